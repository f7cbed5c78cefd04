package files

import (
	"errors"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
)

// fault says in plain words what the kernel answered to an operation on a path.
func fault(err error, verb, path string) error {
	var known *errs.Error
	if errors.As(err, &known) {
		return err
	}
	var errno unix.Errno
	if !errors.As(err, &errno) {
		return errs.Wrap(err, errs.Internal, "cannot %s %s: %v", verb, guestwire.Escape(path), err)
	}
	kind, text := reason(errno)
	p := guestwire.Escape(path)
	switch errno {
	case unix.ENOENT, unix.ENOTDIR, unix.EISDIR, unix.EEXIST, unix.ENOTEMPTY, unix.ELOOP:
		return errs.Wrap(err, kind, "%s: %s", text, p)
	}
	return errs.Wrap(err, kind, "cannot %s %s: %s", verb, p, text)
}

// reason returns the kind and the words of an error number.
func reason(errno unix.Errno) (errs.Kind, string) {
	switch errno {
	case unix.ENOENT:
		return errs.NotFound, "no such file"
	case unix.ENOTDIR:
		return errs.InvalidArgument, "not a directory"
	case unix.EISDIR:
		return errs.InvalidArgument, "is a directory"
	case unix.EEXIST:
		return errs.AlreadyExists, "already exists"
	case unix.ENOTEMPTY:
		return errs.FailedPrecondition, "the directory is not empty"
	case unix.ELOOP:
		return errs.InvalidArgument, "leads through a link that is not followed"
	case unix.EACCES, unix.EPERM:
		return errs.PermissionDenied, "the user may not"
	case unix.EROFS:
		return errs.PermissionDenied, "it is on a read-only file system"
	case unix.ENOSPC, unix.EDQUOT:
		return errs.ResourceExhausted, "no space is left"
	case unix.EFBIG:
		return errs.ResourceExhausted, "the file would be larger than allowed"
	case unix.EMFILE, unix.ENFILE, unix.ENOMEM:
		return errs.ResourceExhausted, "the sandbox has no descriptors or memory left"
	case unix.EBUSY, unix.ETXTBSY:
		return errs.FailedPrecondition, "it is in use"
	case unix.EXDEV:
		return errs.FailedPrecondition, "the two are on different file systems"
	case unix.ENAMETOOLONG:
		return errs.InvalidArgument, "the name is too long"
	case unix.EINVAL:
		return errs.InvalidArgument, "the file system refuses it"
	}
	return errs.Internal, errno.Error()
}
