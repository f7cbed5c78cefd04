package inspect

import (
	"encoding/json"
	"fmt"
	"time"

	"casemate.dev/internal/egress"
	"casemate.dev/internal/secret"
)

// Shared is what the Inspector knows for all sandboxes.
type Shared struct {
	// CertPEM and KeyPEM are the authority that signs what sandboxes are shown.
	CertPEM []byte `json:"cert_pem"`
	KeyPEM  []byte `json:"key_pem"`
	// RootsPEM are the authorities by which servers are verified.
	RootsPEM []byte `json:"roots_pem"`
}

// Private returns s as it crosses the control socket.
func (s Shared) Private() (egress.Private, error) {
	b, err := json.Marshal(s)
	if err != nil {
		return nil, fmt.Errorf("encode the gateway's part: %w", err)
	}
	return b, nil
}

// part is what the Inspector knows of one sandbox, as it crosses the control socket.
type part struct {
	Credentials []wireCredential `json:"credentials,omitempty"`
	Routes      []wireRoute      `json:"routes,omitempty"`
}

type wireCredential struct {
	Secret      string           `json:"secret"`
	Name        string           `json:"name"`
	Version     uint64           `json:"version"`
	Placeholder string           `json:"placeholder"`
	Value       []byte           `json:"value,omitempty"`
	Previous    []byte           `json:"previous,omitempty"`
	Also        [][]byte         `json:"also,omitempty"`
	Bindings    []secret.Binding `json:"bindings"`
}

type wireRoute struct {
	secret.Route
	Token    string       `json:"token"`
	Key      []byte       `json:"key,omitempty"`
	Previous []byte       `json:"previous,omitempty"`
	Version  uint64       `json:"version"`
	Expires  time.Time    `json:"expires"`
	Spent    secret.Spent `json:"spent"`
}

// RoutePart is a model route of a sandbox with what is known of its use.
type RoutePart struct {
	secret.RouteGrant
	Expires time.Time // zero: with the sandbox
	Spent   secret.Spent
}

// Part returns what a sandbox may use as it crosses the control socket. It is the one place where
// values leave their type.
func Part(creds []secret.Credential, routes []RoutePart) (egress.Private, error) {
	var p part
	for _, c := range creds {
		w := wireCredential{
			Secret: c.Secret, Name: c.Name, Version: c.Version, Placeholder: c.Placeholder,
			Value: c.Value.Reveal(), Previous: c.Previous.Reveal(), Bindings: c.Bindings,
		}
		for _, also := range c.Also {
			w.Also = append(w.Also, also.Reveal())
		}
		p.Credentials = append(p.Credentials, w)
	}
	for _, r := range routes {
		p.Routes = append(p.Routes, wireRoute{
			Route: r.Route, Token: r.Token, Key: r.Key.Reveal(), Previous: r.Previous.Reveal(), Version: r.KeyVersion,
			Expires: r.Expires, Spent: r.Spent,
		})
	}
	defer p.wipe()
	if len(p.Credentials) == 0 && len(p.Routes) == 0 {
		return nil, nil
	}
	b, err := json.Marshal(p)
	if err != nil {
		return nil, fmt.Errorf("encode a sandbox's part: %w", err)
	}
	return b, nil
}

func (p part) wipe() {
	for _, c := range p.Credentials {
		clear(c.Value)
		clear(c.Previous)
		for _, also := range c.Also {
			clear(also)
		}
	}
	for _, r := range p.Routes {
		clear(r.Key)
		clear(r.Previous)
	}
}
