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
	Secrets       Access = 8 // keep and bind secrets
	State         Access = 9 // agents' documents
)

// Local is the principal of the server's own Unix socket, which only its owner can reach.
func Local() sandbox.Principal { return sandbox.Principal{ID: "local", Admin: true} }

// Allow decides whether p may use a on something that owner holds; owner is "" where the access is
// not about one sandbox, or the sandbox is looked up later (package sandbox then checks again). An
// unknown access is refused, and so is everything but open methods without a principal. A sandbox
// that calls back never is an admin, whatever its principal says.
func Allow(p sandbox.Principal, a Access, owner string) bool {
	admin := p.Admin && p.Sandbox == ""
	switch a {
	case Open:
		return true
	case SandboxCreate:
		return p.ID != ""
	case SandboxRead, SandboxWrite, Process, Files:
		return p.ID != "" && (owner == "" || admin || p.ID == owner)
	case Admin:
		return p.ID != "" && admin
	case Secrets, State:
		// What a sandbox asks for, code that nobody read asks for.
		return p.ID != "" && p.Sandbox == "" && (owner == "" || admin || p.ID == owner)
	}
	return false
}
