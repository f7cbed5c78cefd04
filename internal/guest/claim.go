package guest

import (
	"path"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guest/account"
	"casemate.dev/internal/guestwire"
)

// maxHostname is the kernel's bound (uname(2)).
const maxHostname = 64

// claim gives the sandbox its identity: all of it, or on error nothing, and only once.
func (g *Guest) claim(r guestwire.Claim) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.id.claimed {
		return errs.New(errs.FailedPrecondition, "the sandbox has been claimed")
	}
	id := identity{claimed: true, claim: r, user: or(r.User, g.id.user), dir: or(r.Dir, g.id.dir)}
	return g.identifyLocked(id)
}

// restored takes up the life that a memory image has saved: with a new identity, or the one that it has.
func (g *Guest) restored(r guestwire.Restored) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	id := g.id
	if c := r.Claim; c != nil {
		id.claimed, id.claim = true, *c
		id.user, id.dir = or(c.User, id.user), or(c.Dir, id.dir)
	}
	return g.identifyLocked(id) // the host name is new in any case
}

func or(a, b string) string {
	if a == "" {
		return b
	}
	return a
}

// identifyLocked gives the sandbox an identity, or on error none.
func (g *Guest) identifyLocked(id identity) error {
	if err := g.checkClaim(&id); err != nil {
		return err
	}
	if name := id.claim.Hostname; name != "" {
		if err := unix.Sethostname([]byte(name)); err != nil {
			return errs.Wrap(err, errs.Internal, "cannot set the host name: %v", err)
		}
	}
	g.id = id
	return nil
}

// checkClaim finds what would otherwise fail every later call.
func (g *Guest) checkClaim(id *identity) error {
	if len(id.claim.Hostname) > maxHostname {
		return errs.New(errs.InvalidArgument, "the host name has %d bytes, limit %d", len(id.claim.Hostname), maxHostname)
	}
	if id.dir != "" && !path.IsAbs(id.dir) {
		return errs.New(errs.InvalidArgument, "the default directory is not absolute: %s", quote(id.dir))
	}
	u, err := g.book.Lookup(id.user)
	if err != nil {
		return err
	}
	if g.cfg.SingleUser {
		if own, err := g.book.Lookup(g.id.user); err != nil || own.UID != u.UID {
			return errs.New(errs.PermissionDenied, "everything in this sandbox runs as user %s", quote(g.id.user))
		}
	}
	_, err = environment(account.User{}, false, g.cfg.Env, id.claim.Env)
	return err
}
