package cli

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"casemate.dev/client"
)

func (a *app) stateListCmd(owner *string) *cobra.Command {
	var all, everybody bool
	cmd := &cobra.Command{
		Use:     "ls [flags] [AGENT[/PREFIX]]",
		Aliases: []string{"list"},
		Short:   "List agents, or an agent's documents",
		Long: `List agents that have documents; or an agent's documents, those whose names begin with PREFIX.

Exit codes: 0, or 125 on failure.`,
		Example: `  casemate state ls
  casemate state ls helper/memory/ --json`,
		Args: between(0, 1, "at most one agent"),
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			if len(args) == 0 {
				return a.listAgents(ctx, c, &client.ListAgentsRequest{Owner: *owner, Everybody: everybody, PageSize: 1000})
			}
			agent, prefix, _ := strings.Cut(args[0], "/")
			req := &client.ListDocumentsRequest{Owner: *owner, Agent: agent, Prefix: prefix, Deleted: all, PageSize: 1000}
			var list []*client.Document
			for {
				page, err := c.State.List(ctx, req)
				if err != nil {
					return cannot(err, "list documents of %s", args[0])
				}
				list = append(list, page.GetDocuments()...)
				if req.PageToken = page.GetNextPageToken(); req.PageToken == "" {
					break
				}
			}
			if a.json {
				return printList(a, "documents", list)
			}
			a.table(documentTable(list, false))
			return nil
		}),
	}
	cmd.Flags().BoolVarP(&all, "all", "a", false, "also documents that are deleted and still have their history")
	cmd.Flags().BoolVar(&everybody, "everybody", false, "agents of all keys, for administrators")
	return cmd
}

func (a *app) listAgents(ctx context.Context, c *client.Client, req *client.ListAgentsRequest) error {
	var list []*client.StateAgent
	for {
		page, next, err := c.State.Agents(ctx, req)
		if err != nil {
			return cannot(err, "list agents")
		}
		list = append(list, page...)
		if req.PageToken = next; next == "" {
			break
		}
	}
	if a.json {
		return printList(a, "agents", list)
	}
	a.table(agentTable(list))
	return nil
}

func agentTable(list []*client.StateAgent) *table {
	t := &table{head: []string{"AGENT", "DOCUMENTS", "SIZE", "WRITES", "KEPT", "OWNER"}}
	for _, s := range list {
		kept := "1000 versions"
		switch n := s.GetRetention().GetVersions(); {
		case n < 0:
			kept = "all versions"
		case n > 0:
			kept = fmt.Sprintf("%d versions", n)
		}
		if s.GetRetention().GetAge() != nil {
			kept += " for " + formatDuration(s.GetRetention().GetAge().AsDuration())
		}
		t.add(s.GetAgent(), s.GetDocuments(), formatSize(s.GetBytes()), s.GetRevision(), kept, s.GetOwner())
	}
	return t
}

// documentTable shows documents, or, with versions, those of one.
func documentTable(list []*client.Document, versions bool) *table {
	now := time.Now()
	t := &table{head: []string{"NAME", "VERSION", "SIZE", "TYPE", "AGE", "BY", "COMMIT"}}
	if versions {
		t.head = t.head[1:]
	}
	for _, d := range list {
		row := []any{d.GetVersion(), formatSize(d.GetSize()), d.GetContentType(), ago(when(d.GetCreatedAt()), now), d.GetAuthor(), cell{orDash(d.GetCommit()), yellow}}
		if d.GetDeleted() {
			row[1], row[2] = "-", cell{"deleted", faint}
		}
		if !versions {
			row = append([]any{d.GetName()}, row...)
		}
		t.add(row...)
	}
	return t
}

func (a *app) stateHistoryCmd(owner *string) *cobra.Command {
	var limit int32
	var below uint64
	cmd := &cobra.Command{
		Use:   "history [flags] AGENT/NAME",
		Short: "List the versions of a document, the newest first",
		Long: `List the versions of a document, the newest first: when they were written and by whom, and the commits that
they belong to. Also of documents that are deleted.

Exit codes: 0, or 125 where there is none.`,
		Args: exactly(1, "one document, AGENT/NAME"),
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			agent, name, err := parseDocument(args[0])
			if err != nil {
				return err
			}
			list, err := c.State.Versions(ctx, &client.ListVersionsRequest{Owner: *owner, Agent: agent, Name: name, Below: below, Limit: limit})
			if err != nil {
				return cannot(err, "list versions of %s", args[0])
			}
			if a.json {
				return printList(a, "versions", list)
			}
			a.table(documentTable(list, true))
			return nil
		}),
	}
	cmd.Flags().Int32VarP(&limit, "limit", "n", 100, "at most so many, up to 1000")
	cmd.Flags().Uint64Var(&below, "below", 0, "only those below this `VERSION`")
	return cmd
}

// errEnough ends a watch that has told of as many versions as were asked for.
var errEnough = errors.New("enough")

func (a *app) stateWatchCmd(owner *string) *cobra.Command {
	var req client.WatchDocumentsRequest
	var count int
	cmd := &cobra.Command{
		Use:   "watch [flags] AGENT[/NAME|/PREFIX/]",
		Short: "Tell of every version as it is written",
		Long: `Tell of every version of an agent's documents as it is written: of one document, of those below a folder
(with a slash at the end), or of all. It begins with what is there, or after a revision or version; nothing
is left out in between, also when the server restarts. With --content, what the versions hold is part of
the JSON.

Exit codes: 0 when it is interrupted or --count is reached, or 125 on failure.`,
		Example: `  casemate state watch helper --after 17 --json
  casemate state watch helper/plan --after-version 3 --count 1`,
		Args: exactly(1, "one agent, or a document or folder of it"),
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			req.Owner = *owner
			rest := ""
			if req.Agent, rest, _ = strings.Cut(args[0], "/"); strings.HasSuffix(rest, "/") {
				req.Prefix = rest
			} else {
				req.Name = rest
			}
			err := c.State.Watch(ctx, &req, nil, func(m *client.WatchedDocument) error {
				if err := a.tellWatched(m); err != nil {
					return err
				}
				if m.GetDocument() == nil {
					return nil
				}
				if count--; count == 0 {
					return errEnough
				}
				return nil
			})
			if ctx.Err() != nil || errors.Is(err, errEnough) {
				return nil // Ctrl-C is how watching ends
			}
			return cannot(err, "watch %s", args[0])
		}),
	}
	cmd.Flags().Uint64Var(&req.After, "after", 0, "only versions after this `REVISION`")
	cmd.Flags().Uint64Var(&req.AfterVersion, "after-version", 0, "only those after this `VERSION` of the document")
	cmd.Flags().BoolVar(&req.Content, "content", false, "with what they hold, in --json")
	cmd.Flags().IntVar(&count, "count", 0, "end after so many (default never)")
	return cmd
}

// tellWatched prints one item of a watch.
func (a *app) tellWatched(m *client.WatchedDocument) error {
	if a.json {
		return a.printJSON(m)
	}
	d := m.GetDocument()
	if d == nil {
		_, err := fmt.Fprintf(a.stdout, "versions up to revision %d may be missing: they are no longer kept\n", m.GetGapTo())
		return err
	}
	did := formatSize(d.GetSize())
	if d.GetDeleted() {
		did = "deleted"
	}
	line := words(when(d.GetCreatedAt()).Local().Format(time.DateTime), fmt.Sprintf("%d", d.GetRevision()), d.GetName(),
		fmt.Sprintf("version %d", d.GetVersion()), did, "by", d.GetAuthor(), d.GetCommit())
	_, err := fmt.Fprintln(a.stdout, clean(line))
	return err
}

// tellDocument makes a sentence of an event about documents.
func tellDocument(e *client.Event, what, by string) story {
	name := said(e, "agent") + "/" + said(e, "name")
	switch what {
	case "set":
		commit := ""
		if c := said(e, "commit"); c != "" {
			commit = "of commit " + c
		}
		return story{words("document", name, "written: version", said(e, "version")+",", formatSize(int64(number(e, "size"))), commit, by), plain}
	case "deleted":
		return story{words("document", name, "deleted: version", said(e, "version"), by), plain}
	case "forgotten":
		return story{words("document", name, "removed with its history", by), plain}
	case "kept":
		return story{words("agent", said(e, "agent"), "keeps", said(e, "versions"), "versions for", said(e, "for"), by), plain}
	}
	return story{words("document", what, by, paren(allFacts(e))), plain}
}
