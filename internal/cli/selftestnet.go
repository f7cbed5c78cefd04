package cli

import (
	"context"
	"encoding/json"

	"github.com/spf13/cobra"

	"casemate.dev/internal/selftest"
)

// selftestNetVerb is the program's hidden command that runs section F of the battery.
const selftestNetVerb = "selftest-network"

// selftestNet runs section F of the battery in a process of its own.
func (a *app) selftestNet(ctx context.Context, o selftest.Options) error {
	args := []string{selftestNetVerb, "--isolation=" + o.Isolation}
	for _, only := range o.Only {
		args = append(args, "--only="+only)
	}
	return a.inOwnNetwork(ctx, func(d *json.Decoder) error {
		var v selftest.Verdict
		if err := d.Decode(&v); err != nil {
			return err
		}
		o.Each(v)
		return nil
	}, args...)
}

// selftestNetCmd is the process that selftestNet starts: the cases of section F, whose verdicts it prints as JSON.
func (a *app) selftestNetCmd() *cobra.Command {
	var o selftest.Options
	cmd := a.ownNetworkCmd(selftestNetVerb, "Attack the way out of sandboxes in a fake internet", func(ctx context.Context, p fakePlace) (err error) {
		if o.Internet, err = selftest.OpenInternet(p.net); err != nil {
			return err
		}
		defer o.Internet.Close()
		if err := o.Internet.Provide(ctx, p.client); err != nil {
			return err
		}
		lines := json.NewEncoder(a.stdout)
		o.Each = func(v selftest.Verdict) { _ = lines.Encode(v) } // whoever reads it has gone, and ends this
		o.Profiles = []string{"locked"}                           // the template of the other is not there: it takes minutes to build
		o.Target = selftest.NewServer(p.client)
		_, err = selftest.Run(ctx, o)
		return err
	})
	cmd.Flags().StringVar(&o.Isolation, "isolation", "", "")
	cmd.Flags().StringSliceVar(&o.Only, "only", nil, "")
	return cmd
}
