// A backend in Go: prints what its node has to do, as states come, and reports how that went.
//
//	go build . && ./go-backend 127.0.0.1:9090 here
//
// Package proxypb is made from ../../proto; it is here so that this builds with Go alone. To make it again:
//
//	protoc -I ../../proto --go_out=. --go_opt=module=example.com/go-backend \
//	    --go_opt=Mknit/proxy/v1alpha1/proxy.proto=example.com/go-backend/proxypb \
//	    knit/proxy/v1alpha1/proxy.proto
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sort"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/protobuf/proto"

	"example.com/go-backend/proxypb"
)

const service = "/knit.proxy.v1alpha1.NodeViews/"

// Everything that is in force, by what it is and its name.
type state map[string]proto.Message

func portName(key *proxypb.PortKey) string {
	name := key.GetNamespace() + "/" + key.GetService()
	if key.GetPort() != "" {
		name += ":" + key.GetPort()
	}
	protocol := strings.TrimPrefix(key.GetProtocol().String(), "PROTOCOL_")
	return name + " " + protocol + " " + strings.TrimPrefix(key.GetFamily().String(), "FAMILY_")
}

func (s state) take(message *proxypb.WatchResponse) {
	set, gone := message.GetSet(), message.GetDelete()
	switch {
	case set.GetNode() != nil:
		s["node"] = set.GetNode()
	case set.GetPort() != nil:
		s["port "+portName(set.GetPort().GetKey())] = set.GetPort()
	case set.GetHealthCheck() != nil:
		s["health check "+set.GetHealthCheck().GetService()] = set.GetHealthCheck()
	case gone.GetPort() != nil:
		delete(s, "port "+portName(gone.GetPort()))
	case gone.GetHealthCheck() != "":
		delete(s, "health check "+gone.GetHealthCheck())
	}
}

// Where a frontend leads: its route says whether to all endpoints, to this node's, or nowhere. A node port has no
// address of its own; the node's settings say on which ones it answers.
//
// A real backend honours all of a Frontend: sources (who may come in, others are dropped), from_pods and from_node
// (another route for these), and whose source address is hidden. The list is in docs/write-your-own-service-proxy.md.
func describe(port *proxypb.Port, frontend *proxypb.Frontend) string {
	at := join(frontend.GetAddress(), frontend.GetPort())
	endpoints := []string{}
	switch frontend.GetRoute().GetAction() {
	case proxypb.Route_ACTION_CLUSTER_ENDPOINTS:
		for _, endpoint := range port.GetCluster() {
			endpoints = append(endpoints, join(endpoint.GetAddress(), endpoint.GetPort()))
		}
	case proxypb.Route_ACTION_LOCAL_ENDPOINTS:
		for _, endpoint := range port.GetLocal() {
			endpoints = append(endpoints, join(endpoint.GetAddress(), endpoint.GetPort()))
		}
	case proxypb.Route_ACTION_DROP:
		return at + " -> drop"
	default:
		return at + " -> reject"
	}
	return at + " -> " + strings.Join(endpoints, " ")
}

func join(address string, port uint32) string {
	return net.JoinHostPort(address, strconv.Itoa(int(port)))
}

// Makes the difference true. A real backend would program something here.
func apply(before, after state) (failed []*proxypb.PortFailure) {
	names := map[string]bool{}
	for name := range before {
		names[name] = true
	}
	for name := range after {
		names[name] = true
	}
	sorted := make([]string, 0, len(names))
	for name := range names {
		sorted = append(sorted, name)
	}
	sort.Strings(sorted)
	for _, name := range sorted {
		was, had := before[name]
		is, has := after[name]
		switch {
		case !has:
			fmt.Println("delete", name)
		case !had || !proto.Equal(was, is):
			fmt.Println("set", name)
			port, _ := is.(*proxypb.Port)
			for _, frontend := range port.GetFrontends() {
				fmt.Println("  " + describe(port, frontend))
			}
			if len(port.GetCluster()) > 1000 {
				reason := "this backend has room for 1000 endpoints"
				failed = append(failed, &proxypb.PortFailure{Key: port.GetKey(), Reason: reason})
			}
		}
	}
	return failed
}

// Follows one stream until it ends. What is known outlives it: the next one begins with everything, and only the
// difference is done.
func follow(ctx context.Context, conn *grpc.ClientConn, watcher string, known *state) error {
	desc := &grpc.StreamDesc{ServerStreams: true}
	stream, err := conn.NewStream(ctx, desc, service+"Watch", grpc.MaxCallRecvMsgSize(64<<20))
	if err != nil {
		return err
	}
	if err := errors.Join(stream.SendMsg(&proxypb.WatchRequest{Watcher: watcher}), stream.CloseSend()); err != nil {
		return err
	}
	next, failed := state{}, map[string]*proxypb.PortFailure{}
	for {
		message := &proxypb.WatchResponse{}
		if err := stream.RecvMsg(message); err != nil {
			return err
		}
		next.take(message)
		sync := message.GetSync()
		if sync == nil {
			continue
		}
		for _, failure := range apply(*known, next) {
			failed[portName(failure.GetKey())] = failure
		}
		report := &proxypb.ReportRequest{Watcher: watcher, Revision: sync.GetRevision()}
		for name, failure := range failed {
			if next["port "+name] == nil || len(next["port "+name].(*proxypb.Port).GetCluster()) <= 1000 {
				delete(failed, name)
				continue
			}
			report.Failed = append(report.Failed, failure)
		}
		if err := conn.Invoke(ctx, service+"Report", report, &proxypb.ReportResponse{}); err != nil {
			return err
		}
		*known = state{}
		for name, object := range next {
			(*known)[name] = object
		}
	}
}

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: go-backend ADDRESS NAME")
		os.Exit(2)
	}
	// A feeder that vanished without a word is noticed: it is asked every 10 seconds whether it is there.
	alive := keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 20 * time.Second}
	conn, err := grpc.NewClient(os.Args[1],
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithKeepaliveParams(alive))
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	known := state{}
	for {
		err := follow(context.Background(), conn, os.Args[2], &known)
		if errors.Is(err, io.EOF) {
			err = errors.New("the feeder closed the stream")
		}
		fmt.Fprintln(os.Stderr, err, "- what is in force stays; trying again")
		time.Sleep(time.Second)
	}
}
