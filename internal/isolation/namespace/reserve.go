package namespace

// ReserveID hands out a user of the host that no sandbox runs as, for a helper of the server, and a function
// that gives it back once nothing runs as it any more.
func (b *Backend) ReserveID() (id uint32, release func(), err error) {
	first, err := b.ids.acquire()
	if err != nil {
		return 0, nil, err
	}
	return first, func() { b.ids.release(first) }, nil
}

// KeepID marks the user of a helper that outlived an earlier server as taken.
func (b *Backend) KeepID(id uint32) { b.ids.take(id) }
