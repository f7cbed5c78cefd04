package rootfs

import "context"

func (s *Store) Changes(ctx context.Context, id string, p Plan, workspace string) ([]Change, error) {
	return nil, nil
}
