package guest

import (
	"os"
	"slices"
	"strings"
	"testing"
)

func TestParseStat(t *testing.T) {
	tests := map[string]procStat{
		"7 (sh) S 1 7 6 0 -1 4194304":         {7, 1, 6},
		"8 (a) b ) (c) R 7 7 6 0":             {8, 7, 6},
		"9 (x) 1 2 3) S 5 5 5 0":              {9, 5, 5},
		"10 (\xff\n\x00) D 1 10 10 34816 10 ": {10, 1, 10},
	}
	for text, want := range tests {
		if got, ok := parseStat([]byte(text)); !ok || got != want {
			t.Errorf("%q: %+v, %v", text, got, ok)
		}
	}
	for _, text := range []string{"", "7", "7 (sh)", "7 (sh) Z 1 7 7", ") S 1 1 1 (", "x (sh) S 1 1 1"} {
		if got, ok := parseStat([]byte(text)); ok {
			t.Errorf("%q: %+v", text, got)
		}
	}
}

func FuzzParseStat(f *testing.F) {
	f.Add([]byte("8 (a) b ) (c) R 7 7 6 0"))
	f.Add([]byte(")("))
	f.Fuzz(func(_ *testing.T, b []byte) { parseStat(b) })
}

func TestDescentMembers(t *testing.T) {
	d := &descent{pid: 10, mark: "none"}
	all := []procStat{{10, 1, 10}, {11, 10, 10}, {12, 11, 12}, {13, 12, 13}, {20, 1, 10}, {30, 1, 30}, {31, 30, 30}}
	// The first process's parent is the guest, which in this test is not process 1.
	for i := range all {
		if all[i].pid == 10 {
			all[i].parent = os.Getpid()
		}
	}
	want := []int{10, 11, 12, 13, 20}
	if got := keys(d.members(all)); !slices.Equal(got, want) {
		t.Errorf("running: %v, want %v", got, want)
	}
	// After it has ended, its session still tells, unless another process has the number.
	if got := keys(d.members(all[4:])); !slices.Equal(got, []int{20}) {
		t.Errorf("ended: %v", got)
	}
	reused := append(slices.Clone(all[4:]), procStat{10, 30, 10})
	if got := keys(d.members(reused)); len(got) != 0 {
		t.Errorf("number given to another: %v", got)
	}
}

func keys(m map[int]bool) []int {
	var list []int
	for k, in := range m {
		if in {
			list = append(list, k)
		}
	}
	slices.Sort(list)
	return list
}

func TestParseListenings(t *testing.T) {
	const table = `  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid
   0: 0100007F:1F41 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000
   1: 0100007F:1F41 0100007F:C3A6 01 00000000:00000000 00:00000000 00000000  1000
   2: 00000000000000000000000001000000:0050 00000000000000000000000000000000:0000 0A 0 0
   3: broken 0 0A
   4: 0100007F:FFFFF 0 0A
`
	if got := parseListenings([]byte(table)); !slices.Equal(got, []int{8001, 80}) {
		t.Errorf("%v", got)
	}
}

func TestDiskMounts(t *testing.T) {
	const table = `21 1 0:20 / / rw,relatime - overlay overlay rw
22 21 0:21 / /proc rw - proc proc rw
23 21 0:22 / /a\040b\134c rw shared:1 - btrfs /dev/loop0 rw
24 21 0:23 / /x rw
25 21 0:24 / /tmp rw - tmpfs tmpfs rw
`
	if got := diskMounts([]byte(table)); !slices.Equal(got, []string{"/", `/a b\c`}) {
		t.Errorf("%q", got)
	}
}

func TestShortArgv(t *testing.T) {
	long := []string{"a", strings.Repeat("b", maxInfoArgv), "c"}
	if got := shortArgv(long); len(got) != 2 || got[1] != "…" {
		t.Errorf("%d arguments", len(got))
	}
	if got := shortArgv([]string{"a", "b"}); len(got) != 2 {
		t.Errorf("%q", got)
	}
}

func TestReadPids(t *testing.T) {
	got, err := readPids(strings.NewReader("0\n1\n12\nx\n13"))
	if err != nil || !slices.Equal(got, []int{12, 13}) {
		t.Errorf("%v, %v", got, err)
	}
}
