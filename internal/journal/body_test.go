package journal

// WithBody is WithKept for content that is there as a whole, all of which is kept.
func (e Event) WithBody(o Observer, name string, content []byte) Event {
	k := NewKeeper(true)
	_, _ = k.Write(content) // never fails
	return e.WithKept(o, name, k)
}
