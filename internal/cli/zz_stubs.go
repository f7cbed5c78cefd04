package cli

import (
	"context"

	"casemate.dev/client"
	"github.com/spf13/cobra"
)

func (a *app) serveCmd() *cobra.Command    { return &cobra.Command{Use: "serve"} }
func (a *app) upCmd() *cobra.Command       { return &cobra.Command{Use: "up"} }
func (a *app) downCmd() *cobra.Command     { return &cobra.Command{Use: "down"} }
func (a *app) doctorCmd() *cobra.Command   { return &cobra.Command{Use: "doctor"} }
func (a *app) selftestCmd() *cobra.Command { return &cobra.Command{Use: "selftest"} }
func (a *app) benchCmd() *cobra.Command    { return &cobra.Command{Use: "bench"} }
func (a *app) createKeyIn(ctx context.Context, dir string, req *client.CreateKeyRequest) error {
	return nil
}
