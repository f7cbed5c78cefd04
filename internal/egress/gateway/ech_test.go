package gateway

import (
	"crypto/ecdh"
	"crypto/rand"
	"crypto/tls"
	"encoding/binary"
	"testing"

	"casemate.dev/internal/testenv/world"
)

// echKey makes a key for encrypted hellos whose outer one names a server, and the list of configurations by which
// clients use it (RFC 9849, section 4).
func echKey(t *testing.T, outer string) (tls.EncryptedClientHelloKey, []byte) {
	t.Helper()
	key, err := ecdh.X25519().GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	public := key.PublicKey().Bytes()
	var body []byte
	body = append(body, 7)                             // config_id
	body = binary.BigEndian.AppendUint16(body, 0x0020) // DHKEM(X25519, HKDF-SHA256)
	body = binary.BigEndian.AppendUint16(body, uint16(len(public)))
	body = append(body, public...)
	body = binary.BigEndian.AppendUint16(body, 4)      // one suite:
	body = binary.BigEndian.AppendUint16(body, 0x0001) // HKDF-SHA256
	body = binary.BigEndian.AppendUint16(body, 0x0001) // AES-128-GCM
	body = append(body, 32, byte(len(outer)))          // maximum_name_length, public_name
	body = append(body, outer...)
	body = binary.BigEndian.AppendUint16(body, 0) // no extensions
	config := binary.BigEndian.AppendUint16(nil, 0xfe0d)
	config = binary.BigEndian.AppendUint16(config, uint16(len(body)))
	config = append(config, body...)
	list := binary.BigEndian.AppendUint16(nil, uint16(len(config)))
	return tls.EncryptedClientHelloKey{Config: config, PrivateKey: key.Bytes()}, append(list, config...)
}

// echTwin returns the name that a server with the key reads where nothing stands between it and the client.
func echTwin(t *testing.T, w *world.World, key tls.EncryptedClientHelloKey, list []byte) string {
	t.Helper()
	const addr = world.Other + ":443"
	conf := w.TLS("allowed.test", "denied.test")
	conf.EncryptedClientHelloKeys = []tls.EncryptedClientHelloKey{key}
	read := make(chan string, 1)
	l := tls.NewListener(w.Listen(addr), conf)
	go func() {
		c, err := l.Accept()
		if err != nil {
			return
		}
		s := c.(*tls.Conn)
		_ = s.Handshake()
		read <- s.ConnectionState().ServerName
		_ = c.Close()
	}()
	c, err := tls.Dial("tcp", addr, &tls.Config{ //nolint:gosec // an attacker
		ServerName: "denied.test", EncryptedClientHelloConfigList: list, MinVersion: tls.VersionTLS13, InsecureSkipVerify: true,
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	return <-read
}
