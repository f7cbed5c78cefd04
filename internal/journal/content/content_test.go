package content

import (
	"bytes"
	"testing"

	"pgregory.net/rapid"

	"casemate.dev/internal/journal/bundle"
)

// TestKeepersHashAllAndKeepBothEnds writes in pieces of any size, and compares with the whole.
func TestKeepersHashAllAndKeepBothEnds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		k := NewKeeper(true)
		var whole []byte
		for _, n := range rapid.SliceOfN(rapid.IntRange(0, Most), 0, 8).Draw(t, "sizes") {
			piece := bytes.Repeat([]byte{byte(len(whole))}, n)
			_, _ = k.Write(piece)
			whole = append(whole, piece...)
		}
		if cap(k.head)+cap(k.tail) > 3*Most {
			t.Fatalf("%d bytes of memory", cap(k.head)+cap(k.tail))
		}
		b := k.Kept()
		ref := b.Ref()
		if b.Size != int64(len(whole)) || k.Size() != b.Size || b.Check() != nil {
			t.Fatalf("%d bytes are %d: %v", len(whole), b.Size, b.Check())
		}
		if len(whole) == 0 {
			return
		}
		if ref.Body != bundle.HashBody(b.Salt, whole) {
			t.Fatal("the hash is of something else")
		}
		want := whole
		if len(whole) > Most {
			want = append(bytes.Clone(whole[:Most/2]), whole[len(whole)-Most/2:]...)
			if ref.Kept != Most || ref.Tail != Most/2 || ref.Head != bundle.HashBody(b.Salt, want) {
				t.Fatalf("of %d bytes: %+v", len(whole), ref)
			}
		}
		if !bytes.Equal(b.Data, want) {
			t.Fatalf("of %d bytes %d are kept", len(whole), len(b.Data))
		}
	})
}

// What another process says of content is held against what can be.
func TestCheckRefusesWhatCannotBe(t *testing.T) {
	k := NewKeeper(true)
	_, _ = k.Write([]byte("content"))
	good := k.Kept()
	long := NewKeeper(true)
	_, _ = long.Write(make([]byte, 2*Most))
	cut := long.Kept()
	forgotten := NewKeeper(true)
	_, _ = forgotten.Write([]byte("content"))
	forgotten.Forget()
	_, _ = forgotten.Write([]byte(" goes on"))
	hashed := forgotten.Kept()
	if !hashed.Ref().Hashed || hashed.Size != 15 {
		t.Errorf("forgotten content is %+v", hashed.Ref())
	}
	for name, k := range map[string]Kept{"whole": good, "cut": cut, "without data": good.WithoutData(), "forgotten": hashed, "empty": {}} {
		if err := k.Check(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, change := range map[string]func(*Kept){
		"other content":    func(k *Kept) { k.Data = []byte("CONTENT") },
		"no salt":          func(k *Kept) { k.Salt = nil },
		"no hash":          func(k *Kept) { k.Hash = "" },
		"negative":         func(k *Kept) { k.Size = -1 },
		"more than all":    func(k *Kept) { k.Size = 3 },
		"tail of a whole":  func(k *Kept) { k.Tail = 1 },
		"too much":         func(k *Kept) { k.Size, k.Data = 1<<40, make([]byte, Most+1) },
		"tail beyond data": func(k *Kept) { k.Size, k.Tail = 1<<20, 100 },
		"not empty":        func(k *Kept) { k.Size = 0 },
	} {
		bad := good
		change(&bad)
		if bad.Check() == nil {
			t.Errorf("%s is taken", name)
		}
	}
}
