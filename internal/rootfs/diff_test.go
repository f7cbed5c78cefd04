package rootfs

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"casemate.dev/internal/errs"
)

func TestDiff(t *testing.T) {
	every(t, func(t *testing.T, s *Store) {
		base, _ := grown(t, s, "", func(root string) {
			shell(t, root, `rm -rf ./*; seq 9 >text; echo x >gone; printf 'a\0b' >binary; head -c 2M /dev/zero >large
				ln -s old link; echo x >mode; echo x >owner; echo x >attr; mkdir dir; echo same >same`)
		})
		to, _ := grown(t, s, base.ID, func(root string) {
			shell(t, root, `sed -i s/5/five/ text; rm gone; printf 'a\0c' >binary; echo more >>large; ln -sfn new link
				chmod 600 mode; chown 7:8 owner; setfattr -n user.note -v hi attr 2>/dev/null || python3 -c 'import os; os.setxattr("attr", "user.note", b"hi")'
				rmdir dir; printf 'no newline' >added; touch same`)
		})
		diffs, err := s.Diff(t.Context(), State{Layer: base.ID}, State{Layer: to.ID}, DiffOptions{Patches: true})
		must(t, err)
		got := map[string]string{}
		for _, d := range diffs {
			line := d.Op
			if d.Before != nil && d.After != nil && d.Before.Mode != d.After.Mode {
				line += fmt.Sprintf(" %o to %o", d.Before.Mode, d.After.Mode)
			}
			if d.Before != nil && d.After != nil && d.Before.UID != d.After.UID {
				line += fmt.Sprintf(" of %d:%d", d.After.UID, d.After.GID)
			}
			if d.TargetBefore != d.TargetAfter {
				line += fmt.Sprintf(" %s to %s", d.TargetBefore, d.TargetAfter)
			}
			got[d.Path] = fmt.Sprintf("%s %v %s +%d -%d %s", line, d.Attributes, d.LeftOut, d.Added, d.Removed, d.Patch)
		}
		want := map[string]string{
			"/text":   "modified []  +1 -1 @@ -2,7 +2,7 @@\n 2\n 3\n 4\n-5\n+five\n 6\n 7\n 8\n",
			"/gone":   "removed []  +0 -1 @@ -1,1 +0,0 @@\n-x\n",
			"/binary": "modified [] binary +0 -0 ",
			"/large":  "modified [] large +0 -0 ",
			"/link":   "modified old to new []  +0 -0 ",
			"/mode":   "modified 644 to 600 []  +0 -0 ",
			"/owner":  "modified of 7:8 []  +0 -0 ",
			"/attr":   "modified [user.note]  +0 -0 ",
			"/dir":    "removed []  +0 -0 ",
			"/added":  "added []  +1 -0 @@ -0,0 +1,1 @@\n+no newline\n\\ No newline at end of file\n",
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("(-want +got):\n%s", d)
		}
		diffs, err = s.Diff(t.Context(), State{Layer: base.ID}, State{Layer: to.ID}, DiffOptions{Paths: []string{"/mode", "/tex"}})
		if err != nil || len(diffs) != 1 || diffs[0].Path != "/mode" {
			t.Errorf("of one path: %+v, %v", diffs, err)
		}
		diffs, err = s.Diff(t.Context(), State{Layer: to.ID}, State{Layer: to.ID}, DiffOptions{Patches: true})
		if err != nil || len(diffs) != 0 {
			t.Errorf("with itself: %+v, %v", diffs, err)
		}
	})
}

// TestDiffWorkspaces: commits of a sandbox with a workspace differ in it, too, beside what its folder on the host
// has now.
func TestDiffWorkspaces(t *testing.T) {
	every(t, func(t *testing.T, s *Store) {
		source := t.TempDir()
		shell(t, source, `echo host >a; echo host >gone; echo host >left; mkdir d; echo host >d/x`)
		request := Request{Workspaces: []WorkspaceRequest{{Source: source, Target: "/workspace"}}}
		id, p := plan(t, s, request)
		shell(t, p.Upper, `echo root >etc-file`)
		shell(t, p.Workspaces[0].Upper, `printf 'host\none\n' >a; chown 1000:1000 a; echo new >new`)
		first := commit(t, s, id, p)
		shell(t, p.Workspaces[0].Upper, `printf 'host\ntwo\n' >a; rm new; mknod gone c 0 0`)
		second := commit(t, s, id, p)
		diff := func(from, to State, o DiffOptions) map[string]string {
			t.Helper()
			o.Patches = true
			all, err := s.Diff(t.Context(), from, to, o)
			must(t, err)
			got := map[string]string{}
			for _, d := range all {
				got[d.Path] = d.Op
				if d.Patch != "" {
					_, got[d.Path], _ = strings.Cut(d.Patch, "\n")
				}
				for _, f := range []*FileState{d.Before, d.After} {
					if f != nil && strings.HasPrefix(d.Path, "/workspace/a") && f.UID != defaultUID {
						t.Errorf("%s belongs to %d", d.Path, f.UID)
					}
				}
			}
			return got
		}
		for what, tt := range map[string]struct {
			from, to State
			o        DiffOptions
			want     map[string]string
		}{
			"between commits": {
				State{Layer: first.ID},
				State{Layer: second.ID},
				DiffOptions{},
				map[string]string{"/workspace/a": " host\n-one\n+two\n", "/workspace/new": "-new\n", "/workspace/gone": "-host\n"},
			},
			"back": {
				State{Layer: second.ID},
				State{Layer: first.ID},
				DiffOptions{Paths: []string{"/workspace/gone", "/etc-file"}},
				map[string]string{"/workspace/gone": "+host\n"},
			},
			"from what it started from": {
				State{Layer: first.ID, Template: true},
				State{Layer: first.ID},
				DiffOptions{},
				map[string]string{"/etc-file": "+root\n", "/workspace/a": " host\n+one\n", "/workspace/new": "+new\n"},
			},
			"the root alone": {
				State{Layer: first.ID, Template: true},
				State{Layer: first.ID},
				DiffOptions{Part: "/"},
				map[string]string{"/etc-file": "+root\n"},
			},
			"the workspace alone, to a sandbox": {
				State{Layer: first.ID},
				State{ID: id, Plan: p},
				DiffOptions{Part: "/workspace", Paths: []string{"/workspace/a"}},
				map[string]string{"/workspace/a": " host\n-one\n+two\n"},
			},
		} {
			if d := cmp.Diff(tt.want, diff(tt.from, tt.to, tt.o)); d != "" {
				t.Errorf("%s (-want +got):\n%s", what, d)
			}
		}
		if _, err := s.Diff(t.Context(), State{Layer: first.ID}, State{Layer: second.ID}, DiffOptions{Part: "/none"}); !errs.Is(err, errs.NotFound) {
			t.Errorf("a workspace that is none: %v", err)
		}
		// The folder is gone: what was committed is still there to be compared.
		must(t, os.RemoveAll(source))
		want := map[string]string{"/workspace/a": " host\n-one\n+two\n", "/workspace/new": "-new\n"}
		if d := cmp.Diff(want, diff(State{Layer: first.ID}, State{Layer: second.ID}, DiffOptions{})); d != "" {
			t.Errorf("without the folder (-want +got):\n%s", d)
		}
	})
}
