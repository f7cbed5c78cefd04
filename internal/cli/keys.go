package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"casemate.dev/client"
)

func (a *app) keysCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "keys",
		Short: "Make, list and revoke API keys",
		Long: `Make, list and revoke API keys. Programs that reach the server over TCP show one; the local socket asks
for none. A key's holder sees and changes the sandboxes made with it, and no others.

Exit codes: 0, or 125 on failure.`,
	}
	return group(cmd, a.keysCreateCmd(), a.keysListCmd(), a.keysRevokeCmd())
}

func (a *app) keysCreateCmd() *cobra.Command {
	req := &client.CreateKeyRequest{}
	var dataDir string
	cmd := &cobra.Command{
		Use:   "create [NAME]",
		Short: "Make a key and print its secret, this one time",
		Long: `Make an API key and print its secret. It is stored hashed and can't be shown again.

With --data-dir the key is made in a server's data directory without asking the server, also while it
runs; it counts from its next request on.

Exit codes: 0, or 125 on failure.`,
		Example: `  export CASEMATE_API_KEY=$(casemate keys create laptop)
  casemate keys create --e2b sdk`,
		Args: between(0, 1, "at most one name"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 1 {
				req.Name = args[0]
			}
			if dataDir != "" {
				return a.createKeyIn(cmd.Context(), dataDir, req)
			}
			return a.withClient(func(ctx context.Context, c *client.Client, _ []string) error {
				key, secret, err := c.System.CreateKey(ctx, req)
				if err != nil {
					return cannot(err, "create a key")
				}
				return a.printKey(key, secret)
			})(cmd, args)
		},
	}
	cmd.Flags().BoolVar(&req.Admin, "admin", false, "its holder may see and change every sandbox, and keys")
	cmd.Flags().BoolVar(&req.E2B, "e2b", false, "a key of the shape that E2B's SDKs want, e2b_…")
	cmd.Flags().StringVar(&dataDir, "data-dir", "", "work in this data directory instead of asking a server")
	return cmd
}

func (a *app) printKey(key *client.Key, secret string) error {
	if a.json {
		raw, err := marshalJSON(key)
		if err != nil {
			return err
		}
		return a.printJSON(map[string]any{"key": json.RawMessage(raw), "secret": secret})
	}
	fmt.Fprintln(a.stdout, secret)
	if _, tty := terminal(a.stderr); tty {
		a.note("key %s; it is not shown again", key.GetId())
	}
	return nil
}

func (a *app) keysListCmd() *cobra.Command {
	return &cobra.Command{
		Use:     "list",
		Aliases: []string{"ls"},
		Short:   "List keys, without their secrets",
		Long:    "List keys, without their secrets.\n\nExit codes: 0, or 125 on failure.",
		Args:    exactly(0, "no arguments"),
		RunE: a.withClient(func(ctx context.Context, c *client.Client, _ []string) error {
			keys, err := c.System.Keys(ctx)
			if err != nil {
				return cannot(err, "list keys")
			}
			if a.json {
				return printList(a, "keys", keys)
			}
			now := time.Now()
			t := &table{head: []string{"ID", "NAME", "ACCESS", "AGE", "STATE"}}
			for _, k := range keys {
				access, state := "own sandboxes", cell{"valid", green}
				if k.GetAdmin() {
					access = "admin"
				}
				if k.GetRevokedAt() != nil {
					state = cell{"revoked", faint}
				}
				t.add(k.GetId(), orDash(k.GetName()), access, formatAge(when(k.GetCreatedAt()), now), state)
			}
			a.table(t)
			return nil
		}),
	}
}

func (a *app) keysRevokeCmd() *cobra.Command {
	return &cobra.Command{
		Use:   "revoke KEY-ID",
		Short: "End a key, at once",
		Long: `End a key. Requests with it are refused from now on; sandboxes that were made with it stay.

Exit codes: 0, or 125 when there is no such key.`,
		Args: exactly(1, "one key's id"),
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			key, err := c.System.RevokeKey(ctx, args[0])
			if err != nil {
				return cannot(err, "revoke key %s", args[0])
			}
			if a.json {
				return a.printJSON(key)
			}
			fmt.Fprintln(a.stdout, key.GetId(), "revoked")
			return nil
		}),
	}
}

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}
