package e2b

import (
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strings"

	"casemate.dev/internal/sandbox"
)

// headerNotice carries what the maker of a sandbox should know, in the answer to a create.
const headerNotice = "Casemate-Notice"

// standIns returns, best first, what may take the place of a template that the SDKs ask for by themselves,
// so that a new server works from the first second: "base" where their user names nothing, and
// "code-interpreter-v1" in the code interpreter's SDK. Others have none.
func standIns(name string) []string {
	switch name {
	case "base":
		return []string{"host"}
	case "code-interpreter-v1":
		return []string{"code-interpreter", "base", "host"}
	}
	return nil
}

// builtIn are the names that have stand-ins.
func builtIn() []string { return []string{"base", "code-interpreter-v1"} }

// usableTemplate is a template as the Manager knows it.
type usableTemplate struct {
	asked   string // as the caller named it, without a default tag
	name    string
	profile sandbox.Profile
}

// notice tells that another template than the one that was asked for is used; "" where it is not.
func (t usableTemplate) notice() string { return standInNotice(t.asked, t.name) }

func standInNotice(asked, name string) string {
	// E2B's clients have a name of their own for template code-interpreter.
	if asked == name || asked == "" || asked == "code-interpreter-v1" && name == "code-interpreter" {
		return ""
	}
	text := fmt.Sprintf("template %s is not built here, so that template %s stands in for it", asked, name)
	if name == "host" {
		text += ": sudo and other users are missing, and the programs are the machine's own"
	}
	return text
}

// parseTemplate takes [namespace/]alias[:tag] apart.
func parseTemplate(ref string) (name, tag string) {
	if i := strings.LastIndexByte(ref, '/'); i >= 0 {
		ref = ref[i+1:]
	}
	name, tag, _ = strings.Cut(ref, ":")
	if tag == "" {
		tag = defaultTag
	}
	return name, tag
}

// resolveTemplate finds the template that a create names, or what stands in for it.
func (a *API) resolveTemplate(c call, ref string) (usableTemplate, error) {
	name, tag := parseTemplate(ref)
	all, err := a.cfg.Manager.Templates(c.r.Context())
	if err != nil {
		return usableTemplate{}, err
	}
	known, better := false, ""
	for _, candidate := range append([]string{name}, standIns(name)...) {
		for _, t := range all {
			if t.Name != candidate {
				continue
			}
			known = true
			switch {
			case t.Ready && tag == defaultTag:
				u := usable(name, t)
				a.tellStandIn(u, better)
				return u, nil
			case better == "":
				better = candidate
			}
		}
	}
	if made, err := a.commitOf(c.r.Context(), c.p, ref); err == nil {
		return usableTemplate{asked: made.ID, name: made.ID, profile: favourite(made.Profiles)}, nil
	}
	if !known && tag != defaultTag {
		built, err := a.builds(c, name)
		if err != nil {
			return usableTemplate{}, err
		}
		known = len(built) > 0
	}
	if known && tag != defaultTag {
		return usableTemplate{}, fail(http.StatusNotFound, "tag '%s' does not exist for template '%s'", tag, name)
	}
	return usableTemplate{}, fail(http.StatusNotFound, "template '%s' not found", name)
}

// tellStandIn logs the first use of each stand-in. better is a template that could be built instead.
func (a *API) tellStandIn(u usableTemplate, better string) {
	text := u.notice()
	if text == "" {
		return
	}
	if _, told := a.toldOf.LoadOrStore(text, true); told {
		return
	}
	remedy := "none yet: this server does not know how to build it"
	if better != "" {
		remedy = "casemate template build " + better
	}
	a.log.Warn(text, slog.String("remedy", remedy))
}

// allTemplates lists what there is, and what the SDKs may ask for besides.
func (a *API) allTemplates(c call) ([]sandbox.Template, error) {
	all, err := a.cfg.Manager.Templates(c.r.Context())
	if err != nil {
		return nil, err
	}
	for _, name := range builtIn() {
		if !slices.ContainsFunc(all, func(t sandbox.Template) bool { return t.Name == name }) {
			all = append(all, sandbox.Template{Name: name})
		}
	}
	return all, nil
}

// usable takes the profile that E2B's users expect, sudo included, where the template allows it.
func usable(asked string, t sandbox.Template) usableTemplate {
	return usableTemplate{asked: asked, name: t.Name, profile: favourite(t.Profiles)}
}

func favourite(profiles []string) sandbox.Profile {
	if slices.Contains(profiles, string(sandbox.Standard)) {
		return sandbox.Standard
	}
	return ""
}
