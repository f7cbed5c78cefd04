package policy

import (
	"casemate.dev/internal/sandbox"
	"casemate.dev/internal/secret"
)

// SecretCaller returns the principal as package secret sees it.
func SecretCaller(p sandbox.Principal) secret.Caller {
	return secret.Caller{ID: p.ID, Admin: p.Admin && p.Sandbox == "", Sandbox: p.Sandbox != ""}
}

// maxParents bounds how far up a sandbox's parents are followed.
const maxParents = 8

// SecretSubject returns a sandbox as package secret sees it, with its parents, which get finds. A
// parent that is not found stands for one that may use nothing: a child never has more than its parent.
func SecretSubject(sb sandbox.Sandbox, get func(id string) (sandbox.Sandbox, error)) secret.Subject {
	s := subjectOf(sb)
	at := &s
	for range maxParents {
		if sb.Parent == "" {
			return s
		}
		at.Parent = &secret.Subject{}
		var err error
		if sb, err = get(sb.Parent); err != nil {
			return s
		}
		*at.Parent = subjectOf(sb)
		at = at.Parent
	}
	at.Parent = &secret.Subject{}
	return s
}

func subjectOf(sb sandbox.Sandbox) secret.Subject {
	return secret.Subject{ID: sb.ID, Owner: sb.Owner, Template: sb.Spec.Template, Labels: sb.Spec.Labels}
}
