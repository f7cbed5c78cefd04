package e2b

import (
	"fmt"
	"math/big"
	"strings"

	"casemate.dev/internal/id"
)

// The SDKs read the id of a build as a UUID. Ours are 20 characters of [a-z0-9], 104 bits, so that each has a UUID
// (RFC 9562, version 8) that leads back to it.

const digits36 = "0123456789abcdefghijklmnopqrstuvwxyz"

// buildUUID returns a build's id as a UUID.
func buildUUID(buildID string) string {
	n, ok := new(big.Int).SetString(strings.TrimPrefix(buildID, id.Build), 36)
	if !ok || n.BitLen() > 104 {
		return ""
	}
	low := new(big.Int).And(n, big.NewInt(1<<62-1)).Uint64()
	high := new(big.Int).Rsh(n, 62).Uint64()           // 42 bits
	first, second := high>>12, high&0xfff              // before and after the version
	third, last := 1<<15|low>>48&0x3fff, low&(1<<48-1) // with the variant in front
	return fmt.Sprintf("%08x-%04x-8%03x-%04x-%012x", first>>16, first&0xffff, second, third, last)
}

// ofUUID is the inverse of buildUUID; "" for what it never returns.
func ofUUID(text string) string {
	var a, b, c, d, e uint64
	if n, err := fmt.Sscanf(text, "%8x-%4x-8%3x-%4x-%12x", &a, &b, &c, &d, &e); err != nil || n != 5 {
		return ""
	}
	high := (a<<16|b)<<12 | c
	n := new(big.Int).Lsh(new(big.Int).SetUint64(high), 62)
	n.Or(n, new(big.Int).SetUint64(d&0x3fff<<48|e))
	s := n.Text(36)
	if len(s) > id.SandboxLen {
		return ""
	}
	s = id.Build + strings.Repeat(digits36[:1], id.SandboxLen-len(s)) + s
	if buildUUID(s) != text {
		return ""
	}
	return s
}
