// Package layer turns the archives of image layers into directories that overlayfs takes as layers, and back
// (OCI image-spec, layer.md).
//
// What belongs here: the archive's form, whiteouts, owners, modes, attributes, and the bounds of what an archive
// may do. What does not: where archives come from, what they are compressed with beyond naming it, and the process
// in which they are unpacked (package worker).
//
// # What an archive can't do
//
// Every path is taken apart into names. A name ".." is refused, an absolute path starts at the layer's root, and
// each directory on the way is opened below the one before, without following a link. A symbolic link of this
// very layer on the way is followed by its text, inside the root, as a container engine would; nothing on the host
// is ever the end of one. The last name is never followed and never written to: what has it is removed first. A
// hard link leads to a file that this layer holds. Devices are left out, since a sandbox has its own /dev, and what is
// a whiteout on disk comes from a whiteout's name only. /dev, /proc and /sys can't be links.
//
// Layers are unpacked each into a directory of its own, which holds nothing of other layers. So no file of one
// layer can lead another layer's files astray; overlayfs puts them together inside the sandbox.
package layer
