// Package clock injects time, so that timers and deadlines can be tested without waiting.
//
// What belongs here: telling time and making timers. What does not: deciding what is due.
//
// Production code takes a Clock; New gives the real one. Tests use testing/synctest or one of their
// own.
package clock

import "time"

// Clock tells time and makes timers.
type Clock interface {
	// Now returns the current time with its monotonic reading.
	Now() time.Time
	// AfterFunc calls f in its own goroutine after d, unless stopped first.
	AfterFunc(d time.Duration, f func()) Timer
}

// Timer is a pending AfterFunc.
type Timer interface {
	// Stop prevents the call; it reports false when the call has begun or ended.
	Stop() bool
}

type system struct{}

// New returns the system's clock.
func New() Clock { return system{} }

func (system) Now() time.Time { return time.Now() }

func (system) AfterFunc(d time.Duration, f func()) Timer { return time.AfterFunc(d, f) }
