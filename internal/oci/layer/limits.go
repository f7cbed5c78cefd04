package layer

import (
	"io"

	"casemate.dev/internal/errs"
)

// Limits bound what one layer may unpack to. A zero field means the value in its comment.
type Limits struct {
	// Bytes bounds the sizes of the files together, holes included, and the archive itself: 32 GiB.
	Bytes int64 `json:"bytes"`
	// Files bounds the entries: 2,000,000.
	Files int64 `json:"files"`
	// Ratio bounds how many bytes one byte of the compressed archive may become, beyond the first 256 MiB:
	// 200. Programs and texts compress 2 to 10 times.
	Ratio int64 `json:"ratio"`
}

// ratioFrom is how large an archive is before its ratio counts: a layer may well be one empty disk image.
const ratioFrom = 256 << 20

// Filled returns the limits with a value for each.
func (l Limits) Filled() Limits {
	set := func(v *int64, to int64) {
		if *v <= 0 {
			*v = to
		}
	}
	set(&l.Bytes, 32<<30)
	set(&l.Files, 2_000_000)
	set(&l.Ratio, 200)
	return l
}

// archive returns how large the archive itself may be, given its compressed size.
func (l Limits) archive(compressed int64) int64 {
	byRatio := max(compressed, 1)
	if byRatio > l.Bytes/l.Ratio {
		return l.Bytes
	}
	return min(l.Bytes, max(byRatio*l.Ratio, ratioFrom))
}

func errBytes(l Limits) error {
	return errs.New(errs.TooLarge, "the layer unpacks to more than %d MB", l.Bytes>>20).
		WithHint("if you trust it, start the server with a larger --max-image-size")
}

func errFiles(l Limits) error {
	return errs.New(errs.TooLarge, "the layer holds more than %d files", l.Files).
		WithHint("if you trust it, start the server with a larger --max-image-files")
}

// bounded reads at most left bytes, and says then why there are no more.
type bounded struct {
	r    io.Reader
	left int64
	why  error
}

// Read implements io.Reader.
func (b *bounded) Read(p []byte) (int, error) {
	if b.left <= 0 {
		if n, err := b.r.Read(make([]byte, 1)); n == 0 && err != nil {
			return 0, err
		}
		return 0, b.why
	}
	n, err := b.r.Read(p[:min(int64(len(p)), b.left)])
	b.left -= int64(n)
	return n, err
}
