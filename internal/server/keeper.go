package server

import (
	"context"
	"fmt"

	"casemate.dev/internal/isolation/keeper"
	"casemate.dev/internal/isolation/keeper/watch"
)

// KeeperVerb is the program's first argument that makes it the keeper process; see RunKeeper.
const KeeperVerb = keeper.Verb

// RunKeeper is the keeper process, which a server starts.
func RunKeeper() error { return watch.Main() }

// followCalls records what the keeper saw while no server ran, and what it sees from now on.
func (s *Server) followCalls(ctx context.Context) error {
	if s.keeper == nil {
		return nil
	}
	position, err := s.manager.CallsPosition(ctx)
	if err != nil {
		return fmt.Errorf("read which system calls are recorded: %w", err)
	}
	s.background(ctx, func(ctx context.Context) { s.keeper.Follow(ctx, position, s.manager.RecordCalls) })
	return nil
}
