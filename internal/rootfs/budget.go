package rootfs

import "slices"

// claim is what one layer holds and what it was promised.
type claim struct {
	used int64
	want int64 // the limit that was asked for
}

// share divides the capacity of a store into limits, one per claim. Nobody gets more than it wants or
// less than it uses. Where not everybody can have all, each gets the same room above what it uses, as
// far as it wants it: so the sum of the limits never exceeds the capacity, unless the layers use more
// than that already, and one that fills up takes nothing from what another has.
func share(capacity int64, claims []claim) []int64 {
	limits := make([]int64, len(claims))
	order := make([]int, len(claims)) // by how much room each wants, the least first
	left := capacity
	for i, c := range claims {
		order[i] = i
		left -= c.used
	}
	room := func(c claim) int64 { return max(0, c.want-c.used) }
	slices.SortFunc(order, func(a, b int) int { return int(min(1, max(-1, room(claims[a])-room(claims[b])))) })
	left = max(0, left)
	for k, i := range order {
		// Equal parts of what is left; what the small ones don't want falls to the larger ones.
		get := min(room(claims[i]), left/int64(len(order)-k))
		limits[i] = claims[i].used + get
		left -= get
	}
	return limits
}
