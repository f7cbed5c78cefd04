package cli

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/timestamppb"

	"casemate.dev/client"
)

func (a *app) lsCmd() *cobra.Command {
	var all, quiet bool
	var labels []string
	cmd := &cobra.Command{
		Use:     "ls [flags]",
		Aliases: []string{"list", "ps"},
		Short:   "List sandboxes",
		Long: `List the sandboxes that are there, the newest first; with --all also those that have ended.

Exit codes: 0, or 125 when the server could not be asked.`,
		Args: exactly(0, "no arguments"),
		RunE: a.withClient(func(ctx context.Context, c *client.Client, _ []string) error {
			pairs, err := parsePairs("label", labels)
			if err != nil {
				return err
			}
			req := &client.ListRequest{Labels: pairs}
			if all {
				req.States = []string{"starting", "running", "paused", "stopping", "stopped"}
			}
			list, err := c.Sandboxes.All(ctx, req)
			if err != nil {
				return cannot(err, "list sandboxes")
			}
			switch {
			case a.json:
				return printList(a, "sandboxes", list)
			case quiet:
				for _, s := range list {
					fmt.Fprintln(a.stdout, s.GetId())
				}
			default:
				a.table(sandboxTable(list, all, time.Now()))
			}
			return nil
		}),
	}
	cmd.Flags().BoolVarP(&all, "all", "a", false, "also sandboxes that have ended")
	cmd.Flags().BoolVarP(&quiet, "quiet", "q", false, "ids only")
	cmd.Flags().StringArrayVar(&labels, "label", nil, "only those with label `KEY=VALUE` (repeatable)")
	return cmd
}

func sandboxTable(list []*client.Sandbox, ended bool, now time.Time) *table {
	t := &table{head: []string{"ID", "NAME", "STATE", "TEMPLATE", "PROFILE", "AGE", "EXPIRES"}}
	if ended {
		t.head = append(t.head, "ENDED")
	}
	for _, s := range list {
		name := s.GetName()
		if name == s.GetId() || name == "" {
			name = "-"
		}
		row := []any{
			s.GetId(), shorten(name, 32),
			cell{stateText(s), stateStyle(s.GetState())},
			s.GetTemplate(), s.GetProfile(),
			formatAge(when(s.GetCreatedAt()), now), expires(s, now),
		}
		if ended {
			row = append(row, s.GetEndReason())
		}
		t.add(row...)
	}
	return t
}

// when converts a timestamp; an unset one is the zero time.
func when(t *timestamppb.Timestamp) time.Time {
	if t == nil {
		return time.Time{}
	}
	return t.AsTime()
}

func expires(s *client.Sandbox, now time.Time) string {
	if s.GetExpiresAt() == nil || s.GetState() == "stopped" {
		return "-"
	}
	return "in " + formatDuration(max(0, s.GetExpiresAt().AsTime().Sub(now)).Truncate(time.Second))
}

// stateText is a sandbox's state as people read it.
func stateText(s *client.Sandbox) string {
	if s.GetFilesOnly() {
		return s.GetState() + ", files only"
	}
	if s.GetOnDisk() {
		return s.GetState() + ", on disk"
	}
	return s.GetState()
}

func stateStyle(state string) style {
	switch state {
	case "running":
		return green
	case "paused", "starting", "stopping":
		return yellow
	}
	return faint
}
