package rootfs

// hold keeps the committed layers of states from being removed until release is called, and nothing else: commits and
// collections go on meanwhile. A state whose layer is not there holds nothing, and whoever reads it finds that out.
func (s *Store) hold(states ...State) (release func()) {
	s.kept.change.RLock() // none goes between being found and being held
	defer s.kept.change.RUnlock()
	return s.holdFound(states...)
}

// holdFound is hold. Preconditions: kept.change is held.
func (s *Store) holdFound(states ...State) (release func()) {
	s.kept.mu.Lock()
	defer s.kept.mu.Unlock()
	var held []string
	for _, state := range states {
		stack := state.Plan.Committed
		if l, ok := s.kept.layers[state.Layer]; ok {
			stack = l.stack()
		}
		held = append(held, stack...)
	}
	for _, id := range held {
		s.kept.held[id]++
	}
	return func() {
		s.kept.mu.Lock()
		defer s.kept.mu.Unlock()
		for _, id := range held {
			if s.kept.held[id]--; s.kept.held[id] == 0 {
				delete(s.kept.held, id)
			}
		}
	}
}
