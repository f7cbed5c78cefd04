package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"casemate.dev/bench"
)

// benchNetVerb is the program's hidden command that measures HTTPS for bench.
const benchNetVerb = "bench-network"

// benchHTTPS measures in a process of its own, with a server that is gone afterwards.
func (a *app) benchHTTPS(ctx context.Context, o bench.Options) (row bench.Row, err error) {
	err = a.inOwnNetwork(ctx, nil, func(d *json.Decoder) error { return d.Decode(&row) },
		benchNetVerb, "--isolation="+o.Isolation, fmt.Sprintf("--quick=%t", o.Quick))
	return row, err
}

// benchNetCmd is the process that benchHTTPS starts. It prints a row as JSON.
func (a *app) benchNetCmd() *cobra.Command {
	var o bench.Options
	cmd := a.ownNetworkCmd(benchNetVerb, "Measure HTTPS in a fake internet", func(ctx context.Context, p fakePlace) error {
		row, err := bench.HTTPS(ctx, o, bench.Internet{Net: p.net, Client: p.client, CAFile: p.dir + "/ca.pem", Gateway: p.gateway})
		if err != nil {
			return err
		}
		return json.NewEncoder(a.stdout).Encode(row)
	})
	cmd.Flags().StringVar(&o.Isolation, "isolation", "", "")
	cmd.Flags().BoolVar(&o.Quick, "quick", false, "")
	return cmd
}

// gateway returns the process id of the server's gateway.
func (p fakePlace) gateway() (int, error) {
	raw, err := os.ReadFile(p.dir + "/r/gateway.json")
	if err != nil {
		return 0, err
	}
	var record struct {
		PID int `json:"pid"`
	}
	err = json.Unmarshal(raw, &record)
	return record.PID, err
}
