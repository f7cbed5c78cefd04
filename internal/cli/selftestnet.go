package cli

import (
	"context"
	"encoding/json"
	"io"
	"slices"

	"github.com/spf13/cobra"

	"casemate.dev/client"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/selftest"
)

// selftestNetVerb is the program's hidden command that runs section F of the battery.
const selftestNetVerb = "selftest-network"

// selftestNet runs section F of the battery in a process of its own. For profile standard its server gets the template
// of this machine's server, c, which may be nil without that profile.
func (a *app) selftestNet(ctx context.Context, c *client.Client, o selftest.Options) error {
	args := []string{selftestNetVerb, "--isolation=" + o.Isolation}
	for _, only := range o.Only {
		args = append(args, "--only="+only)
	}
	for _, profile := range o.Profiles {
		args = append(args, "--profile="+profile)
	}
	var in io.Reader
	if slices.Contains(o.Profiles, "standard") {
		image, _, err := c.Images.Export(ctx, selftest.StandardTemplate, "oci", "")
		if err != nil {
			return err
		}
		defer func() { _ = image.Close() }()
		in = image
	}
	return a.inOwnNetwork(ctx, in, func(d *json.Decoder) error {
		var v selftest.Verdict
		if err := d.Decode(&v); err != nil {
			return err
		}
		o.Each(v)
		return nil
	}, args...)
}

// selftestNetCmd is the process that selftestNet starts: the cases of section F, whose verdicts it prints as JSON. It
// reads the image of profile standard, if it is to attack that.
func (a *app) selftestNetCmd() *cobra.Command {
	var o selftest.Options
	cmd := a.ownNetworkCmd(selftestNetVerb, "Attack the way out of sandboxes in a fake internet", func(ctx context.Context, p fakePlace) (err error) {
		target := selftest.NewServer(p.client)
		if slices.Contains(o.Profiles, "standard") {
			const name = "standard"
			if _, _, err := p.client.Images.Import(ctx, a.stdin, name); err != nil {
				return errs.Wrap(err, errs.Unavailable, "the template of profile standard could not be taken over")
			}
			target.Use("standard", name)
		}
		if o.Internet, err = selftest.OpenInternet(p.net); err != nil {
			return err
		}
		defer o.Internet.Close()
		if err := o.Internet.Provide(ctx, p.client); err != nil {
			return err
		}
		lines := json.NewEncoder(a.stdout)
		o.Each = func(v selftest.Verdict) { _ = lines.Encode(v) } // whoever reads it has gone, and ends this
		o.Target = target
		_, err = selftest.Run(ctx, o)
		return err
	})
	cmd.Flags().StringVar(&o.Isolation, "isolation", "", "")
	cmd.Flags().StringSliceVar(&o.Only, "only", nil, "")
	cmd.Flags().StringSliceVar(&o.Profiles, "profile", nil, "")
	return cmd
}
