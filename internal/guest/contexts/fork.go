package contexts

import (
	"os"
	"sync"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
)

// fork answers context.fork.
func (s *Set) fork(c *guestwire.Conn, call guestwire.Call, files []*os.File) error {
	r, err := body[guestwire.ForkContexts](call)
	if err == nil {
		err = checkFork(r, len(files))
	}
	var z *interpreter
	if err == nil {
		z, err = s.get(r.Zygote)
	}
	if err == nil && z.forks == nil {
		err = errs.New(errs.FailedPrecondition, "context %s can't be forked", quote(z.id))
	}
	if err != nil {
		closeFiles(files)
		return err
	}
	words := make(chan guestwire.Forked, len(r.IDs))
	s.forkAll(z, r, files, words)
	for range r.IDs {
		_ = c.Event(<-words) // a caller that has left asks for what has come to be
	}
	return c.End(nil)
}

func checkFork(r guestwire.ForkContexts, files int) error {
	for _, id := range r.IDs {
		if err := checkCreate(guestwire.CreateContext{ID: id, StartMS: r.StartMS}); err != nil {
			return err
		}
	}
	roles := 0
	for _, layout := range r.Scopes {
		roles += len(layout)
	}
	switch {
	case len(r.IDs) == 0 || len(r.IDs) > guestwire.MaxForkBatch:
		return errs.New(errs.InvalidArgument, "%d forks at once, not 1 to %d", len(r.IDs), guestwire.MaxForkBatch)
	case len(r.Scopes) != 0 && len(r.Scopes) != len(r.IDs), roles != files:
		return errs.New(errs.InvalidArgument, "%d forks with %d scopes, %d roles and %d files", len(r.IDs), len(r.Scopes), roles, files)
	}
	return nil
}

// forkAll forks z, and says one word about each of what was asked for. It takes over files.
func (s *Set) forkAll(z *interpreter, r guestwire.ForkContexts, files []*os.File, words chan<- guestwire.Forked) {
	tell := func(c *interpreter, attached bool) {
		<-c.ready
		word := guestwire.Forked{ID: c.id}
		if c.failed != nil {
			f := guestwire.FailureOf(c.failed)
			word.Failed = &f
		} else {
			word.Info = c.snapshot()
			word.Info.Attached = attached
		}
		words <- word
	}
	var all []*interpreter
	for i, id := range r.IDs {
		var layout []string
		if len(r.Scopes) > 0 {
			layout = r.Scopes[i]
		}
		own := files[:len(layout)]
		files = files[len(layout):]
		c, fresh, err := s.enter(guestwire.CreateContext{ID: id, Language: z.req.Language, StartMS: r.StartMS}, z)
		switch {
		case err != nil:
			closeFiles(own)
			f := guestwire.FailureOf(err)
			words <- guestwire.Forked{ID: id, Failed: &f}
		case !fresh:
			closeFiles(own)
			go tell(c, true)
		default:
			if c.place, err = s.cfg.Launcher.NewPlace(layout, own); err != nil {
				s.made(c, err)
				tell(c, false)
				continue
			}
			all = append(all, c)
		}
	}
	z.forks.fork(all, func(c *interpreter, d *running, err error) {
		go func() {
			if err == nil {
				err = c.comeUp(d)
			}
			s.made(c, err)
			tell(c, false)
		}()
	})
}

// drop ends contexts and forgets them. Ids that are not known are passed over.
func (s *Set) drop(ids []string) {
	zygotes := make(map[*forks]bool)
	var all sync.WaitGroup
	for _, id := range ids {
		c, err := s.get(id)
		if err != nil {
			continue
		}
		if c.zygote != nil {
			zygotes[c.zygote.forks] = true
		}
		all.Go(func() {
			s.leave(c)
			c.delete()
		})
	}
	all.Wait()
	for f := range zygotes {
		f.reapAll()
	}
}
