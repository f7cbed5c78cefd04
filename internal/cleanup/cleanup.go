// Package cleanup is an undo stack for multi-step construction: each step that succeeded adds its
// undo, an error runs them in reverse, and success releases them.
//
//	undo := cleanup.New(func() { _ = conn.Close() })
//	defer undo.Run()
//	…
//	undo.Release()
//
// What belongs here: the stack. What does not: any step; those are their callers'.
package cleanup

// Stack holds the undo steps taken so far. It is not safe for concurrent use.
type Stack struct{ steps []func() }

// New returns a stack with the given steps.
func New(steps ...func()) *Stack { return &Stack{steps: steps} }

// Add puts a step on top.
func (s *Stack) Add(step func()) { s.steps = append(s.steps, step) }

// Run calls the steps, newest first, and empties the stack. A second call does nothing.
func (s *Stack) Run() {
	for i := len(s.steps) - 1; i >= 0; i-- {
		s.steps[i]()
	}
	s.steps = nil
}

// Release forgets the steps: what was built is kept.
func (s *Stack) Release() { s.steps = nil }
