// Package id makes and checks identifiers.
//
// A sandbox id is 20 characters of [a-z0-9], so that it is a DNS label (RFC 1035) everywhere;
// other ids carry a prefix that tells what they name.
//
// What belongs here: making ids, and checking their form. What does not: looking up what they name.
package id

import "crypto/rand"

const alphabet = "abcdefghijklmnopqrstuvwxyz0123456789"

// SandboxLen is the length of a sandbox id: 20 characters are 103 bits.
const SandboxLen = 20

// Prefixes of ids that do not name a sandbox.
const (
	Process  = "prc_"
	Key      = "key_"
	Server   = "srv_"
	Error    = "err_"
	Upload   = "upl_"
	Mount    = "mnt_"
	Template = "tpl_"
	Commit   = "cmt_"
	Secret   = "sec_"
	Binding  = "bnd_"
	Route    = "rte_"
	Context  = "ctx_"
	Run      = "run_"
	Build    = "bld_"
	Files    = "fls_"
)

// Sandbox returns a new random sandbox id. It starts with a letter, so that it is also a valid
// host name by RFC 952.
func Sandbox() string { return letter() + random(SandboxLen-1) }

// New returns prefix followed by 20 random characters.
func New(prefix string) string { return prefix + random(SandboxLen) }

// ValidSandbox reports whether s has the form of a sandbox id.
func ValidSandbox(s string) bool {
	if len(s) != SandboxLen {
		return false
	}
	for i := range len(s) {
		if c := s[i]; (c < 'a' || c > 'z') && (c < '0' || c > '9') {
			return false
		}
	}
	return true
}

func letter() string {
	for {
		if s := random(1); s[0] >= 'a' {
			return s
		}
	}
}

// random returns n characters, each uniform over the alphabet: bytes from 252 up are dropped,
// since 252 = 7 × 36.
func random(n int) string {
	out := make([]byte, 0, n)
	var buf [32]byte
	for len(out) < n {
		_, _ = rand.Read(buf[:]) // never fails: crypto/rand.Read
		for _, b := range buf {
			if b < 252 && len(out) < n {
				out = append(out, alphabet[b%36])
			}
		}
	}
	return string(out)
}
