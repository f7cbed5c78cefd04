package rootfs

import (
	"maps"
	"path"
	"slices"
	"strings"
	"time"
)

// Settings are what the maker of a template says about the processes that run in it: the part of an OCI image's
// configuration (image-spec, config.md) that means something here. Env, User and Dir hold at run time; the
// rest is kept, shown, and handed on with an export.
type Settings struct {
	// Env are variables as NAME=value, in order.
	Env []string `json:"env,omitempty"`
	// User is a name or a number, or two of these with a colon between: the user's, and the group's. "" is root.
	User string `json:"user,omitempty"`
	// Dir is the absolute working directory; "" is /.
	Dir        string            `json:"dir,omitempty"`
	Entrypoint []string          `json:"entrypoint,omitempty"`
	Cmd        []string          `json:"cmd,omitempty"`
	Labels     map[string]string `json:"labels,omitempty"`
	// Exposed are ports as in 8080/tcp, Volumes are paths.
	Exposed    []string `json:"exposed,omitempty"`
	Volumes    []string `json:"volumes,omitempty"`
	Shell      []string `json:"shell,omitempty"`
	StopSignal string   `json:"stop_signal,omitempty"`
	// Healthcheck is how its service is found to work; nil: it says nothing.
	Healthcheck *Healthcheck `json:"healthcheck,omitempty"`
	// OnBuild are instructions for builds upon it.
	OnBuild []string `json:"on_build,omitempty"`
}

// Healthcheck is how an image finds out whether its service works.
type Healthcheck struct {
	// Test is as in an image's configuration: ["CMD", argv…], ["CMD-SHELL", line] or ["NONE"].
	Test        []string      `json:"test,omitempty"`
	Interval    time.Duration `json:"interval,omitempty"`
	Timeout     time.Duration `json:"timeout,omitempty"`
	StartPeriod time.Duration `json:"start_period,omitempty"`
	// StartInterval is a field of newer images, which no library of ours writes: it does not go out with an export.
	StartInterval time.Duration `json:"start_interval,omitempty"`
	Retries       int           `json:"retries,omitempty"`
}

// lockedUser is who runs everything in profile locked where the template's user is root: that profile has
// one user without rights, whatever the image asks for.
const lockedUser = "1000"

// apply makes a plan say what the settings do.
func (c Settings) apply(p *Plan, profile string) {
	p.Env = make(map[string]string, len(c.Env))
	for _, kv := range c.Env {
		if name, value, ok := strings.Cut(kv, "="); ok && name != "" {
			p.Env[name] = value
		}
	}
	p.User = c.User
	if p.User == "" {
		p.User = "root"
	}
	p.Dir = path.Join("/", c.Dir)
	if profile != "standard" && isRoot(p.User) {
		p.User = lockedUser
		if p.Env["HOME"] == "" {
			p.Env["HOME"] = "/tmp" // no image has a home for a user that it does not know
		}
	}
}

// isRoot reports whether an image's user is root, as far as its name says.
func isRoot(user string) bool {
	name, _, _ := strings.Cut(user, ":")
	return name == "" || name == "root" || strings.Trim(name, "0") == ""
}

// settingsOf are the settings that a plan of a built-in template stands for.
func settingsOf(p Plan) Settings {
	c := Settings{User: p.User, Dir: p.Dir}
	for _, name := range slices.Sorted(maps.Keys(p.Env)) {
		c.Env = append(c.Env, name+"="+p.Env[name])
	}
	return c
}
