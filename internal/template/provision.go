package template

import (
	"context"
	"strings"
)

// provisionAction makes the user that steps run as, where what the build begins with lacks it.
type provisionAction struct{ user, home string }

// provisionScript knows the two families of programs that make users: shadow's and BusyBox's.
const provisionScript = `set -e
id -u "$1" >/dev/null 2>&1 && exit 0
shell=/bin/sh
[ ! -x /bin/bash ] || shell=/bin/bash
if command -v useradd >/dev/null; then useradd -m -d "$2" -s "$shell" "$1"; else adduser -D -h "$2" -s "$shell" "$1"; fi
if [ -d /etc/sudoers.d ]; then
	echo "$1 ALL=(ALL:ALL) NOPASSWD:ALL" >"/etc/sudoers.d/$1"
	chmod 440 "/etc/sudoers.d/$1"
fi`

func (a provisionAction) prepare(context.Context, *execution, *state) (*work, error) {
	c := command{
		argv: []string{"/bin/sh", "-c", provisionScript, "sh", a.user, a.home}, user: "root", dir: "/", shown: "make user " + a.user,
		env: map[string]string{"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
	}
	return &work{
		parts: []string{"provision", a.user, a.home, provisionScript},
		run:   func(ctx context.Context, b *box) error { return b.run(ctx, c) },
	}, nil
}

// alias returns what stands for an image; "" where nothing does.
func alias(all map[string]string, ref string) string {
	for name, to := range all {
		if fullName(name) == fullName(ref) {
			return to
		}
	}
	return ""
}

// fullName completes an image's name as container engines do.
func fullName(ref string) string {
	ref = strings.TrimPrefix(strings.TrimPrefix(ref, "docker.io/"), "library/")
	if !strings.ContainsAny(ref[strings.LastIndexByte(ref, '/')+1:], ":@") {
		ref += ":latest"
	}
	return ref
}
