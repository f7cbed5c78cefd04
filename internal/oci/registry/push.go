package registry

import (
	"context"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"

	"casemate.dev/internal/errs"
)

// Push writes an image under the name's tag: what the registry lacks of it, the manifest last. progress is
// called with how many bytes of how many are through, also those that were there.
func (r *Repo) Push(ctx context.Context, img v1.Image, progress func(done, total int64)) error {
	if r.ref.digest != "" {
		return errs.New(errs.InvalidArgument, "an image is pushed to a tag, and %s names a digest", r.ref)
	}
	updates := make(chan v1.Update, 64)
	seen := make(chan struct{})
	go func() {
		defer close(seen)
		for u := range updates {
			if u.Error == nil {
				progress(u.Complete, u.Total)
			}
		}
	}()
	err := remote.Write(r.ref.repo.Tag(r.ref.tag), img, remote.WithTransport(r.tr), remote.WithContext(ctx),
		remote.WithJobs(3), remote.WithProgress(updates), remote.WithRetryBackoff(remote.Backoff{
			Duration: r.c.cfg.Backoff, Factor: 2, Jitter: 0.5, Steps: tries,
		}))
	<-seen
	if err != nil {
		return told(err, "push %s", r.ref)
	}
	return nil
}
