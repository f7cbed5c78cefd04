package rules

import (
	"slices"
	"strings"

	"casemate.dev/internal/errs"
)

// MaxRules bounds the rules of one sandbox, those of named sets included.
const MaxRules = 2000

// Text is a rule as people write it: "allow RULE" or "deny RULE", where RULE may be @NAME for every rule of
// a named set.
type Text string

// Open is the name of the set that allows every name and public address on every port of TCP.
const Open = "open"

// Expand parses rules and puts the rules of named sets in their place, in order. set returns the rules of a
// set, without allow or deny in front. Kinds: InvalidArgument, and what set returns.
func Expand(list []Text, set func(name string) ([]string, error)) ([]Rule, error) {
	var out []Rule
	for _, t := range list {
		action, text, _ := strings.Cut(strings.TrimSpace(string(t)), " ")
		text = strings.TrimSpace(text)
		if action != "allow" && action != "deny" || text == "" {
			return nil, errs.New(errs.InvalidArgument, "the rule %q is neither allow RULE nor deny RULE", cut(string(t)))
		}
		texts := []string{text}
		if name, ok := strings.CutPrefix(text, "@"); ok {
			var err error
			if texts, err = members(name, set); err != nil {
				return nil, err
			}
		}
		for _, x := range texts {
			r, err := Parse(x, action == "deny")
			if err != nil {
				return nil, err
			}
			out = append(out, r)
		}
		if len(out) > MaxRules {
			return nil, errs.New(errs.InvalidArgument, "the sandbox has more than %d network rules", MaxRules)
		}
	}
	return out, nil
}

func members(name string, set func(string) ([]string, error)) ([]string, error) {
	if name == Open {
		return []string{"*:*"}, nil
	}
	if set == nil {
		return nil, errs.New(errs.NotFound, "there is no set of network rules called %q", cut(name))
	}
	return set(name)
}

// Special reports whether the rule allows addresses that need a rule of their own: private ones, the
// host's loopback, metadata services. Giving such a rule is giving away more than the internet.
func (r Rule) Special() bool {
	p := r.host.prefix
	return !r.deny && p.IsValid() && slices.ContainsFunc(special(), func(b block) bool {
		return b.prefix.Bits() <= p.Bits() && b.prefix.Contains(p.Addr())
	})
}
