package control

import (
	"net"

	"casemate.dev/internal/cleanup"
	"casemate.dev/internal/linux/daemon"
)

// Verb is the program's first argument that makes it a gateway.
const Verb = "gateway"

// NameserversOf returns the name servers among the arguments of a gateway.
func NameserversOf(args []string) []string { return args }

func (g *Gateway) spec(uid uint32) daemon.Spec {
	return daemon.Spec{
		Dir: g.cfg.RunDir, Name: "gateway", Program: g.cfg.Program, Args: append([]string{Verb}, g.cfg.Nameservers...), UID: uid,
	}
}

// start makes the gateway process, as a user of its own.
func (g *Gateway) start() (*daemon.Process, error) {
	uid, release, err := g.cfg.UID()
	if err != nil {
		return nil, err
	}
	undo := cleanup.New(release)
	defer undo.Run()
	p, err := g.spec(uid).Start()
	if err != nil {
		return nil, err
	}
	undo.Release()
	g.release = release
	return p, nil
}

// adopt finds the gateway that an earlier server left; nil where there is none.
func (g *Gateway) adopt() (*daemon.Process, error) {
	p, err := g.spec(0).Find()
	if err == nil && p != nil {
		g.cfg.KeepUID(p.UID)
	}
	return p, err
}

func (g *Gateway) dial() (*net.UnixConn, error) { return g.spec(0).Dial() }
