package server

import "testing"

func TestCellSpares(t *testing.T) {
	for asked, want := range map[int]int{0: gvisorSpares, -1: -1, gvisorSpares: gvisorSpares, 32: gvisorSpares} {
		if got := cellSpares(asked); got != want {
			t.Errorf("with %d guests waiting, %d cells wait, want %d", asked, got, want)
		}
	}
}
