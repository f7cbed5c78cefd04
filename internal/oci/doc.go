// Package oci moves templates and commits in and out as OCI images: from and to registries, and as archives.
//
// An image that comes in becomes an imported image of package rootfs and a template that leads to it. Each of its
// layers is fetched (package registry), checked against its digest, unpacked in a confined process (package worker)
// and checked against its diff id; only then it is part of anything. The archives are kept beside, so that what came
// in goes out again bit by bit, and its digest with it. What goes out of a commit is one layer for each layer that it
// stands on, packed the same way every time.
//
// What belongs here: images as a whole, their manifests and configurations, what is shared between imports at the
// same time, and archives of images. What does not: who may import or push (package api), and secrets, which whoever
// calls has looked up.
//
// # On disk
//
//	<data-dir>/oci/
//	  blobs/<hex>      layers' archives as they came, by the sha256 that was checked
//	  partial/<hex>    the beginning of one, which a later import goes on with
//	  work/            what one import or export needs; emptied when the server starts
package oci
