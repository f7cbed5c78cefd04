// Command casemate runs AI agents' code in sandboxes. Everything is in package cli.
package main

import (
	"os"

	"casemate.dev/internal/cli"
)

// version is set by the build (-ldflags '-X main.version=…').
var version = "dev"

func main() { os.Exit(cli.Main(version, os.Args[1:])) }
