package cli

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"casemate.dev/client"
)

func (a *app) caCmd() *cobra.Command {
	return &cobra.Command{
		Use:   "ca",
		Short: "Print the certificate to trust for HTTPS, and tell how",
		Long: `Print the certificate of the server's own authority on stdout, and on stderr how programs are made to
trust it. With it https://PORT-SANDBOX.DOMAIN and the API over HTTPS work in browsers, curl and the SDKs.

The authority is this server's alone and limited to its names and addresses; its key lies in the keys
directory. A new --domain gives it a new certificate, which is to be trusted then. A server that was given
a certificate by --tls-cert has no authority.

Exit codes: 0, or 125 on failure.`,
		Example: `  casemate ca > casemate-ca.pem
  curl --cacert casemate-ca.pem https://127.0.0.1:7433/-/health`,
		Args: exactly(0, "no arguments"),
		RunE: a.withClient(func(ctx context.Context, c *client.Client, _ []string) error {
			ca, err := c.System.Authority(ctx)
			if err != nil {
				return cannot(err, "get the server's certificate authority")
			}
			if a.json {
				return a.printJSON(ca)
			}
			fmt.Fprintln(a.stdout, cleanLines(ca.GetPem()))
			a.tellTrust(ca)
			return nil
		}),
	}
}

// tellTrust tells how programs are made to trust an authority.
func (a *app) tellTrust(ca *client.Authority) {
	a.note("sha256  %s", ca.GetSha256())
	a.note("for     %s", strings.Join(ca.GetNames(), ", "))
	a.note("until   %s", ca.GetNotAfter().AsTime().Format("2006-01-02"))
	if d := ca.GetDomain(); d != "" {
		a.note("ports   https://PORT-SANDBOX.%s", d)
	}
	fmt.Fprintln(a.stderr, howToTrust)
}

const howToTrust = `
Put it in a file, casemate ca > casemate-ca.pem, then:
  curl     curl --cacert casemate-ca.pem https://...
  Node.js  export NODE_EXTRA_CA_CERTS=$PWD/casemate-ca.pem
  Python   cat /etc/ssl/certs/ca-certificates.crt casemate-ca.pem > bundle.pem
           export SSL_CERT_FILE=$PWD/bundle.pem REQUESTS_CA_BUNDLE=$PWD/bundle.pem
  Debian   sudo cp casemate-ca.pem /usr/local/share/ca-certificates/casemate.crt && sudo update-ca-certificates
  Fedora   sudo trust anchor casemate-ca.pem
  macOS    sudo security add-trusted-cert -d -r trustRoot -k /Library/Keychains/System.keychain casemate-ca.pem
Firefox keeps a list of its own: Settings, Certificates, Authorities, Import.`
