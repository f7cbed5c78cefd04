package guest

import (
	"errors"
	"strconv"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guest/spawn"
	"casemate.dev/internal/guestwire"
)

// startError says in plain words why a process did not start.
func startError(err error, r *guestwire.StartProcess, a *spawn.Attr) error {
	var e *spawn.Error
	if !errors.As(err, &e) {
		return errs.Wrap(err, errs.Internal, "cannot start a process: %v", err)
	}
	program := quote(r.Argv[0])
	var errno unix.Errno
	_ = errors.As(err, &errno)
	switch e.Step {
	case spawn.StepExec:
		return execError(err, errno, program, r)
	case spawn.StepDir:
		return dirError(err, errno, guestwire.Escape(a.Dir))
	case spawn.StepFork:
		return errs.Wrap(err, errs.ResourceExhausted, "cannot start %s: %s", program, forkReason(errno)).
			WithHint("end processes, or give the sandbox a higher limit")
	case spawn.StepUser, spawn.StepCheck:
		return errs.Wrap(err, errs.PermissionDenied, "cannot start %s as user %d: %v", program, a.UID, e.Err)
	}
	return errs.Wrap(err, errs.Internal, "cannot start %s: %v", program, err)
}

func execError(err error, errno unix.Errno, program string, r *guestwire.StartProcess) error {
	switch errno {
	case unix.ENOENT:
		return errs.Wrap(err, errs.NotFound, "no such program in the sandbox: %s", program).
			WithHint("it is not in PATH, or the interpreter that it names is missing")
	case unix.EACCES, unix.EPERM:
		return errs.Wrap(err, errs.PermissionDenied, "%s may not be executed", program)
	case unix.ENOEXEC:
		return errs.Wrap(err, errs.InvalidArgument, "%s is not a program for this machine", program).
			WithHint("a script needs a first line such as #!/bin/sh")
	case unix.E2BIG:
		return errs.Wrap(err, errs.InvalidArgument, "arguments and environment of %s are too long together", program)
	case unix.ENOMEM:
		return errs.Wrap(err, errs.ResourceExhausted, "no memory to start %s", program)
	case unix.ELOOP, unix.ENOTDIR, unix.ENAMETOOLONG:
		return errs.Wrap(err, errs.InvalidArgument, "%s can't be found: %v", program, errno)
	}
	return errs.Wrap(err, errs.Internal, "cannot execute %s: %v", program, err)
}

func dirError(err error, errno unix.Errno, dir string) error {
	switch errno {
	case unix.ENOENT:
		return errs.Wrap(err, errs.NotFound, "no such directory in the sandbox: %s", dir)
	case unix.ENOTDIR:
		return errs.Wrap(err, errs.InvalidArgument, "not a directory: %s", dir)
	case unix.EACCES, unix.EPERM:
		return errs.Wrap(err, errs.PermissionDenied, "the user may not enter the directory %s", dir)
	}
	return errs.Wrap(err, errs.Internal, "cannot enter the directory %s: %v", dir, err)
}

func forkReason(errno unix.Errno) string {
	switch errno {
	case unix.EAGAIN:
		return "the sandbox has as many processes as it may"
	case unix.ENOMEM:
		return "the sandbox has no memory left"
	}
	return errno.Error()
}

// quote quotes a text for a message, shortened.
func quote(s string) string {
	const most = 200
	if len(s) > most {
		s = s[:most] + "…"
	}
	return strconv.Quote(s)
}
