package fake

import (
	"path"
	"strconv"
	"strings"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/isolation"
)

// userID is the default user's number, as in the real templates.
const userID = 1000

type user struct {
	id   int
	name string
	home string
	// privileged asks no permission (guestwire.Asker.Privileged).
	privileged bool
}

func userName(id int) string {
	switch id {
	case 0:
		return "root"
	case userID:
		return "user"
	}
	return ""
}

// user returns who a request speaks for: a name or a number, "" for the default.
func (m *machine) user(name string) (user, error) {
	m.mu.Lock()
	claim := m.claim
	m.mu.Unlock()
	if name == "" && claim != nil {
		name = claim.User
	}
	if name == "" {
		name = m.spec.Root.User
	}
	switch name {
	case "", "user", strconv.Itoa(userID):
		return user{id: userID, name: "user", home: "/home/user"}, nil
	case "root", "0":
		if m.spec.Profile == isolation.Locked {
			return user{}, errs.New(errs.PermissionDenied, "profile locked has one user")
		}
		return user{id: 0, name: "root", home: "/root"}, nil
	}
	return user{}, errs.New(errs.NotFound, "no such user: %s", name)
}

// dir returns the absolute working directory that a request asks for.
func (m *machine) dir(dir string, u user) string {
	m.mu.Lock()
	claim := m.claim
	m.mu.Unlock()
	if dir == "" && claim != nil {
		dir = claim.Dir
	}
	if dir == "" {
		dir = m.spec.Root.Dir
	}
	if dir == "" {
		dir = u.home
	}
	return absolute(dir, u.home, u)
}

// absolute resolves a path against a base, with "~" for the user's home.
func absolute(p, base string, u user) string {
	switch {
	case p == "~" || strings.HasPrefix(p, "~/"):
		p = u.home + p[1:]
	case !path.IsAbs(p):
		p = path.Join(base, p)
	}
	return path.Clean(p)
}

// env returns a process's environment: the template's, the claim's, the call's, in that order.
func (m *machine) env(u user, own map[string]string) map[string]string {
	env := map[string]string{
		"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": u.home, "USER": u.name, "LOGNAME": u.name, "SHELL": "/bin/sh",
	}
	for k, v := range m.spec.Root.Env {
		env[k] = v
	}
	m.mu.Lock()
	claim := m.claim
	m.mu.Unlock()
	if claim != nil {
		for k, v := range claim.Env {
			env[k] = v
		}
	}
	for k, v := range own {
		env[k] = v
	}
	return env
}
