// Package loop attaches files as block devices.
//
// What belongs here: loop devices. What does not: what lies in the file, and mounting it.
//
// Every device is made with autoclear, so that it goes away by itself with its last user: a server
// that is killed leaves no device behind once its mounts are gone. And a file has at most one device,
// since two would be two caches over one file system, which destroys it: Attach finds the device that
// a file already has.
package loop

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// blockSize is the logical block size of a device. Direct I/O on the file needs a multiple of its
// file system's own, which is 4,096 or less in practice.
const blockSize = 4096

// attempts bounds the race for a free device against others who want one.
const attempts = 64

// Device is an attached file. Closing File detaches it, unless it is mounted or open elsewhere.
type Device struct {
	Path string // as /dev/loop3
	File *os.File
	// Existing says that the file was attached already.
	Existing bool
}

// Close releases the device. Idempotent.
func (d *Device) Close() error {
	if err := d.File.Close(); err != nil && !errors.Is(err, os.ErrClosed) {
		return err
	}
	return nil
}

// Attach returns the block device of a regular file that is open for reading and writing. Callers
// that may race for one file hold a lock on it.
func Attach(file *os.File) (*Device, error) {
	if d, err := Find(file); d != nil || err != nil {
		return d, err
	}
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR|unix.O_CLOEXEC, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("the kernel offers no loop devices (its module loop is not loaded): %w", err)
	}
	if err != nil {
		return nil, err
	}
	defer control.Close()
	for range attempts {
		n, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return nil, os.NewSyscallError("LOOP_CTL_GET_FREE", err)
		}
		d, err := configure(n, file)
		if errors.Is(err, unix.EBUSY) { // somebody else was faster
			continue
		}
		return d, err
	}
	return nil, fmt.Errorf("attach %s: every free loop device was taken by somebody else", file.Name())
}

// configure attaches file to one free device in a single step, so that nobody ever sees it half made.
func configure(n int, file *os.File) (*Device, error) {
	path := "/dev/loop" + strconv.Itoa(n)
	dev, err := os.OpenFile(path, os.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	config := unix.LoopConfig{Fd: uint32(file.Fd()), Size: blockSize}
	// Direct I/O keeps the file's pages out of the cache, where the file system on the device has them
	// already.
	config.Info.Flags = unix.LO_FLAGS_AUTOCLEAR | unix.LO_FLAGS_DIRECT_IO
	copy(config.Info.File_name[:len(config.Info.File_name)-1], file.Name())
	err = unix.IoctlLoopConfigure(int(dev.Fd()), &config)
	if errors.Is(err, unix.EINVAL) { // the file's system has no direct I/O
		config.Info.Flags = unix.LO_FLAGS_AUTOCLEAR
		err = unix.IoctlLoopConfigure(int(dev.Fd()), &config)
	}
	if err != nil {
		_ = dev.Close()
		return nil, os.NewSyscallError("LOOP_CONFIGURE "+path, err)
	}
	return &Device{Path: path, File: dev}, nil
}

// Find returns the device that the file is attached to, or nil. It compares inodes, not names, which
// may mean another file in another mount namespace.
func Find(file *os.File) (*Device, error) {
	var want unix.Stat_t
	if err := unix.Fstat(int(file.Fd()), &want); err != nil {
		return nil, os.NewSyscallError("fstat", err)
	}
	attached, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		return nil, err
	}
	for _, name := range attached {
		path := "/dev/" + strings.Split(name, "/")[3]
		dev, err := os.OpenFile(path, os.O_RDWR|unix.O_CLOEXEC, 0)
		if err != nil { // gone meanwhile
			continue
		}
		// Asked after opening: the open device can't be cleared any more.
		info, err := unix.IoctlLoopGetStatus64(int(dev.Fd()))
		if err == nil && info.Inode == want.Ino && info.Device == want.Dev && info.Flags&unix.LO_FLAGS_READ_ONLY == 0 {
			return &Device{Path: path, File: dev, Existing: true}, nil
		}
		_ = dev.Close()
	}
	return nil, nil
}
