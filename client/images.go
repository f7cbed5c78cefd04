package client

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/url"

	"google.golang.org/protobuf/encoding/protojson"

	v1 "casemate.dev/proto/casemate/v1"
	"casemate.dev/proto/casemate/v1/casematev1connect"
)

// Messages of the API's schema, under short names.
type (
	// Image is a template that was made of an image.
	Image = v1.Image
	// ImageProgress is how far a pull or a push is.
	ImageProgress = v1.ImageProgress
	// PullImageRequest says what image to pull.
	PullImageRequest = v1.PullImageRequest
	// PushImageRequest says what to push, and where.
	PushImageRequest = v1.PushImageRequest
	// PushedImage is what was pushed.
	PushedImage = v1.PushedImage
)

// Images brings OCI images to the server as templates, and takes templates and commits out as images.
type Images struct {
	conn *conn
	rpc  casematev1connect.ImageServiceClient
}

// Pull makes a template of an image in a registry, and tells what is different in it. progress may be nil.
func (i *Images) Pull(ctx context.Context, req *PullImageRequest, progress func(*ImageProgress)) (*Image, []string, error) {
	stream, err := i.rpc.PullImage(ctx, req)
	if err != nil {
		return nil, nil, i.conn.wrap(err)
	}
	last, err := i.follow(stream, progress)
	return last.GetImage(), last.GetWarnings(), err
}

// Push puts a template or a commit into a registry. progress may be nil.
func (i *Images) Push(ctx context.Context, req *PushImageRequest, progress func(*ImageProgress)) (*PushedImage, error) {
	stream, err := i.rpc.PushImage(ctx, req)
	if err != nil {
		return nil, i.conn.wrap(err)
	}
	last, err := i.follow(stream, progress)
	return last.GetPushed(), err
}

// progressStream is what pull and push give.
type progressStream interface {
	Receive() bool
	Msg() *v1.ImageProgress
	Err() error
	Close() error
}

// follow reads a stream to its last message.
func (i *Images) follow(stream progressStream, progress func(*ImageProgress)) (last *ImageProgress, err error) {
	defer func() { _ = stream.Close() }()
	for stream.Receive() {
		m := stream.Msg()
		if m.GetImage() != nil || m.GetPushed() != nil {
			last = m
		} else if progress != nil {
			progress(m)
		}
	}
	if err := stream.Err(); err != nil && !errors.Is(err, io.EOF) {
		return nil, i.conn.wrap(err)
	}
	if last == nil {
		return nil, &Error{Kind: Unavailable, Message: "the server closed the stream before the image was there"}
	}
	return last, nil
}

// Import makes a template of an archive, which r gives: an OCI layout, or what docker save writes. name is the
// template's; empty: the image's.
func (i *Images) Import(ctx context.Context, r io.Reader, name string) (*Image, []string, error) {
	req, err := i.request(ctx, http.MethodPut, url.Values{"name": {name}}, io.NopCloser(r))
	if err != nil {
		return nil, nil, err
	}
	req.Header.Set("Content-Type", "application/x-tar")
	resp, err := i.conn.http.Do(req)
	if err != nil {
		return nil, nil, i.conn.wrap(err)
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK {
		return nil, nil, httpError(resp)
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, 8<<20))
	if err != nil {
		return nil, nil, i.conn.wrap(err)
	}
	got := &v1.ImportImageResponse{}
	if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(body, got); err != nil {
		return nil, nil, &Error{Kind: Internal, Message: "the server's answer can't be read", Err: err}
	}
	return got.GetImage(), got.GetWarnings(), nil
}

// Export returns a template or a commit as an archive, which the caller closes, and the digests of the image and of
// its files; of img nothing else is set. format is oci, the default, or docker; name is what the image is called
// in the archive. An archive that breaks off gives an error from Read, never an early end.
func (i *Images) Export(ctx context.Context, source, format, name string) (archive io.ReadCloser, img *PushedImage, err error) {
	req, err := i.request(ctx, http.MethodGet, url.Values{"source": {source}, "format": {format}, "name": {name}}, nil)
	if err != nil {
		return nil, nil, err
	}
	resp, err := i.conn.http.Do(req)
	if err != nil {
		return nil, nil, i.conn.wrap(err)
	}
	if resp.StatusCode != http.StatusOK {
		defer func() { _ = resp.Body.Close() }()
		return nil, nil, httpError(resp)
	}
	h := resp.Header
	return resp.Body, &PushedImage{Digest: h.Get("Casemate-Image-Digest"), TreeDigest: h.Get("Casemate-Tree-Digest")}, nil
}

// List shows the templates that were made of images.
func (i *Images) List(ctx context.Context) ([]*Image, error) {
	resp, err := i.rpc.ListImages(ctx, &v1.ListImagesRequest{})
	return resp.GetImages(), i.conn.wrap(err)
}

// Delete removes a template that was made of an image.
func (i *Images) Delete(ctx context.Context, name string) (*Image, error) {
	img, err := i.rpc.DeleteImage(ctx, &v1.DeleteImageRequest{Name: name})
	return img, i.conn.wrap(err)
}

func (i *Images) request(ctx context.Context, method string, q url.Values, body io.Reader) (*http.Request, error) {
	req, err := http.NewRequestWithContext(ctx, method, i.conn.base+"/v1/images/archive?"+q.Encode(), body)
	if err != nil {
		return nil, &Error{Kind: InvalidArgument, Message: "the request can't be made", Err: err}
	}
	return req, nil
}
