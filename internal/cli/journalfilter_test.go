package cli

import (
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protojson"

	"casemate.dev/client"
)

// TestEventFilter asks for events by what they are about; each has one that fits and a twin that does not.
func TestEventFilter(t *testing.T) {
	const (
		written = `{"type":"file.written","actor":"key_a","facts":{"server":{"path":"/home/user/a.txt"}}}`
		changed = `{"type":"files.changed","process":"prc_1","facts":{"server":{"files":[{"op":"renamed","path":"/srv/b\u0000ff","from":"/home/user/c"}],"more_in":[{"dir":"/var/log","files":2}]}}}`
		opened  = `{"type":"network.opened","facts":{"server":{"target":"api.example.com:443","path":"/home/user"}}}`
	)
	for name, tc := range map[string]struct {
		filter   eventFilter
		yes, not string
	}{
		"type":                {eventFilter{types: []string{"file"}}, written, changed},
		"whole type":          {eventFilter{types: []string{"network.opened"}}, opened, written},
		"process":             {eventFilter{processes: []string{"prc"}}, changed, written},
		"actor":               {eventFilter{actors: []string{"key_a"}}, written, changed},
		"path":                {eventFilter{paths: []string{"/home/*"}}, written, opened},
		"changed file":        {eventFilter{paths: []string{"/srv/b\xff"}}, changed, written},
		"renamed file":        {eventFilter{paths: []string{"/home/user/c"}}, changed, written},
		"directory with more": {eventFilter{paths: []string{"/var"}}, changed, written},
		"host":                {eventFilter{hosts: []string{"Example.com."}}, opened, written},
	} {
		t.Run(name, func(t *testing.T) {
			if err := tc.filter.check(time.Now()); err != nil {
				t.Fatal(err)
			}
			for text, want := range map[string]bool{tc.yes: true, tc.not: false} {
				e := &client.Event{}
				if err := protojson.Unmarshal([]byte(text), e); err != nil {
					t.Fatal(err)
				}
				if got := tc.filter.fits(e); got != want {
					t.Errorf("%s: %v", text, got)
				}
			}
		})
	}
}
