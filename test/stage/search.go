package stage

import (
	"bytes"
	"io/fs"
	"os"
	"path/filepath"
)

// searched bounds the files that Holding reads: the store's image, which holds sandboxes' files, is larger.
const searched = 64 << 20

// Holding returns which of the server's files hold a word: of its data, its run, its keys and its log.
func (s *Stage) Holding(word string) []string {
	s.T.Helper()
	var found []string
	err := filepath.WalkDir(s.Dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return nil //nolint:nilerr // what goes meanwhile keeps nothing
		}
		if info, err := d.Info(); err != nil || info.Size() > searched {
			return nil //nolint:nilerr // as above
		}
		if data, err := os.ReadFile(path); err == nil && bytes.Contains(data, []byte(word)) {
			found = append(found, path)
		}
		return nil
	})
	if err != nil {
		s.T.Fatal(err)
	}
	return found
}
