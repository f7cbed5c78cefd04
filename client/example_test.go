package client_test

import (
	"context"
	"fmt"
	"log"
	"os"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"casemate.dev/client"
)

// A sandbox is made, used and deleted.
func Example() {
	ctx := context.Background()
	c, err := client.New("", "") // CASEMATE_URL and CASEMATE_API_KEY, or the local socket
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()
	sb, err := c.Sandboxes.Create(ctx, &client.CreateRequest{Lifetime: durationpb.New(10 * time.Minute)})
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _, _ = c.Sandboxes.Delete(ctx, sb.GetId()) }()

	res, err := c.Processes.Execute(ctx, sb.GetId(), &client.ProcessSpec{Argv: []string{"python3", "-c", "print(6*7)"}}, nil)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%s%s", res.GetStdout(), res.GetProcess().GetEnd())
}

// Run passes streams through as they come, and survives a restart of the server.
func ExampleProcesses_Run() {
	ctx := context.Background()
	c, err := client.New("http://127.0.0.1:7433", "csm_…")
	if err != nil {
		log.Fatal(err)
	}
	p, err := c.Processes.Run(ctx, "my-sandbox", &client.ProcessSpec{Argv: []string{"make", "test"}, Dir: "/home/user/src"},
		client.RunOptions{Stdout: os.Stdout, Stderr: os.Stderr, Hold: true})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(p.GetEnd(), p.GetCode())
}

// Write replaces a file at once; Open reads a part of it.
func ExampleFiles() {
	ctx := context.Background()
	c, err := client.New("", "")
	if err != nil {
		log.Fatal(err)
	}
	if _, err := c.Files.Write(ctx, "my-sandbox", "notes.txt", strings.NewReader("hello"), client.WriteOptions{Size: 5}); err != nil {
		log.Fatal(err)
	}
	r, err := c.Files.Open(ctx, "my-sandbox", "notes.txt", client.ReadOptions{Offset: 1, Length: 3})
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = r.Close() }()
}

// KindOf tells what can be done about an error.
func ExampleKindOf() {
	err := error(&client.Error{Kind: client.NotFound, Message: "no sandbox x"})
	if client.KindOf(err) == client.NotFound {
		fmt.Println("make it first")
	}
	// Output: make it first
}
