//go:build !cgo

package testenv

// WithoutCgo has nothing to do: see the file for cgo.
func WithoutCgo() {}
