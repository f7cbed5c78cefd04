package policy

import "casemate.dev/internal/sandbox"

// Access is a kind of access that a method needs, as the API's schema names it.
type Access int

// The kinds of access, with the schema's numbers.
const (
	Open          Access = 1 // anyone who reaches the server
	SandboxCreate Access = 2
	SandboxRead   Access = 3
	SandboxWrite  Access = 4
	Process       Access = 5 // start, feed and signal processes
	Files         Access = 6
	Admin         Access = 7 // the server itself
)

// Allow decides whether p may use a on something that owner holds; owner is "" where the access is
// not about one sandbox. An unknown access is refused.
func Allow(p sandbox.Principal, a Access, owner string) bool {
	switch a {
	case Open:
		return true
	case SandboxCreate:
		return p.ID != ""
	case SandboxRead, SandboxWrite, Process, Files:
		return p.ID != "" && (owner == "" || p.Admin || p.ID == owner)
	case Admin:
		return p.ID != "" && p.Admin && p.Sandbox == ""
	}
	return false
}
