package e2b

import (
	"net/http"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/sandbox"
)

// find returns the sandbox that a call's path names, by its whole id.
func (a *API) find(c call) (sandbox.Sandbox, error) {
	name := sandboxID(c.r.PathValue("id"))
	if !wellFormed(name) {
		return sandbox.Sandbox{}, fail(http.StatusBadRequest, "Invalid sandbox ID")
	}
	s, err := a.cfg.Manager.Get(c.r.Context(), c.p, name)
	if errs.Is(err, errs.NotFound) || errs.Is(err, errs.InvalidArgument) || err == nil && s.ID != name {
		// The Manager also takes names and prefixes, which E2B does not know.
		return s, errNoSandbox(name)
	}
	return s, err
}

// alive is find for what runs or is paused: others are gone for E2B.
func (a *API) alive(c call) (sandbox.Sandbox, error) {
	s, err := a.find(c)
	if err == nil && s.State != sandbox.Running && s.State != sandbox.Paused {
		err = errNoSandbox(s.ID)
	}
	return s, err
}

// gone turns what the Manager says of a sandbox that ended meanwhile into what E2B says.
func gone(s sandbox.Sandbox, err error) error {
	if errs.Is(err, errs.NotFound) || errs.Is(err, errs.FailedPrecondition) {
		return errNoSandbox(s.ID)
	}
	return err
}

func (a *API) detail(c call) error {
	s, err := a.alive(c)
	if err != nil {
		return err
	}
	return c.json(http.StatusOK, a.detailed(s))
}

func (a *API) kill(c call) error {
	s, err := a.find(c)
	if err != nil {
		return err
	}
	if s.State == sandbox.Stopped {
		return errNoSandbox(s.ID)
	}
	if _, err := a.cfg.Manager.Delete(c.r.Context(), c.p, s.ID); err != nil {
		return err
	}
	return c.done()
}

// connect gives the way to a sandbox, resumed where it is paused. It never shortens a lifetime.
func (a *API) connect(c call) error {
	s, err := a.alive(c)
	if err != nil {
		return err
	}
	var req struct {
		Timeout *int64 `json:"timeout"`
		Memory  *bool  `json:"memory"`
	}
	if err := c.decode(&req); err != nil {
		return err
	}
	timeout := int64(timeoutV2)
	if req.Timeout != nil {
		timeout = *req.Timeout
	}
	life, err := lifetime(timeout, 0)
	if err != nil {
		return err
	}
	if err := a.dropMemory(c, s, req.Memory); err != nil {
		return err
	}
	s, err = a.cfg.Manager.Update(c.r.Context(), c.p, s.ID, sandbox.Update{Lifetime: &life, Extend: true})
	if err != nil {
		return gone(s, err)
	}
	status := http.StatusOK
	if s.State == sandbox.Paused { // it may have become so since it was looked at
		status = http.StatusCreated
		if s, err = a.cfg.Manager.Resume(c.r.Context(), c.p, s.ID); err != nil {
			return gone(s, err)
		}
	}
	return c.json(status, a.created(s))
}

// dropMemory makes a paused sandbox one without memory, where a resume asks for that: it then starts anew.
func (a *API) dropMemory(c call, s sandbox.Sandbox, memory *bool) error {
	if memory == nil || *memory || s.State != sandbox.Paused {
		return nil
	}
	if _, err := a.cfg.Manager.PauseFiles(c.r.Context(), c.p, s.ID); err != nil {
		return gone(s, err)
	}
	return nil
}

// resume is what very old SDKs call.
func (a *API) resume(c call) error {
	s, err := a.alive(c)
	if err != nil {
		return err
	}
	if s.State == sandbox.Running {
		return fail(http.StatusConflict, "Sandbox %s is already running", s.ID)
	}
	var req struct {
		Timeout   *int64 `json:"timeout"`
		AutoPause *bool  `json:"autoPause"`
		Memory    *bool  `json:"memory"`
	}
	if err := c.decode(&req); err != nil {
		return err
	}
	if req.AutoPause != nil && *req.AutoPause != s.Spec.PauseAtEnd {
		return notYet("changing autoPause with a resume")
	}
	if err := a.dropMemory(c, s, req.Memory); err != nil {
		return err
	}
	timeout := int64(timeoutV1)
	if req.Timeout != nil {
		timeout = *req.Timeout
	}
	life, err := lifetime(timeout, 1)
	if err != nil {
		return err
	}
	if _, err := a.cfg.Manager.Update(c.r.Context(), c.p, s.ID, sandbox.Update{Lifetime: &life, Extend: true}); err != nil {
		return gone(s, err)
	}
	if s, err = a.cfg.Manager.Resume(c.r.Context(), c.p, s.ID); err != nil {
		return gone(s, err)
	}
	return c.json(http.StatusCreated, a.created(s))
}

func (a *API) pause(c call) error {
	s, err := a.alive(c)
	if err != nil {
		return err
	}
	var req struct {
		Memory *bool `json:"memory"`
	}
	if err := c.decode(&req); err != nil {
		return err
	}
	if s.State == sandbox.Paused {
		return fail(http.StatusConflict, "Error pausing sandbox - sandbox '%s' is already paused", s.ID)
	}
	pause := a.cfg.Manager.PauseRemembering
	if req.Memory != nil && !*req.Memory {
		pause = a.cfg.Manager.PauseFiles
	}
	if _, err := pause(c.r.Context(), c.p, s.ID); err != nil {
		return gone(s, err)
	}
	return c.done()
}

// setTimeout sets the lifetime from now on, also to a shorter one.
func (a *API) setTimeout(c call) error {
	s, err := a.alive(c)
	if err != nil {
		return err
	}
	var req struct {
		Timeout *int64 `json:"timeout"`
	}
	if err := c.decode(&req); err != nil {
		return err
	}
	if req.Timeout == nil {
		return fail(http.StatusBadRequest, "Error when parsing request: timeout is missing")
	}
	return a.renew(c, s, *req.Timeout, false)
}

// refresh makes sure that the sandbox lives that much longer.
func (a *API) refresh(c call) error {
	s, err := a.alive(c)
	if err != nil {
		return err
	}
	req := struct {
		Duration int64 `json:"duration"`
	}{Duration: 60}
	if err := c.decode(&req); err != nil {
		return err
	}
	return a.renew(c, s, req.Duration, true)
}

func (a *API) renew(c call, s sandbox.Sandbox, seconds int64, extend bool) error {
	var life time.Duration
	life, err := lifetime(seconds, 0)
	if err != nil {
		return err
	}
	if _, err := a.cfg.Manager.Update(c.r.Context(), c.p, s.ID, sandbox.Update{Lifetime: &life, Extend: extend}); err != nil {
		return gone(s, err)
	}
	return c.done()
}
