// A proxy as Go programs have it: it copies both ways between each client's connection and one to the server that its argument names.
// Between two TCP connections io.Copy uses splice(2). It prints its port.
package main

import (
	"io"
	"net"
	"os"
	"strconv"
)

func pass(to, from *net.TCPConn) {
	if _, err := io.Copy(to, from); err != nil {
		os.Stderr.WriteString(err.Error() + "\n")
	}
	to.CloseWrite()
}

func main() {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	os.Stdout.WriteString(strconv.Itoa(listener.Addr().(*net.TCPAddr).Port) + "\n")
	for {
		client, err := listener.Accept()
		if err != nil {
			panic(err)
		}
		server, err := net.Dial("tcp", os.Args[1])
		if err != nil {
			panic(err)
		}
		go pass(server.(*net.TCPConn), client.(*net.TCPConn))
		go pass(client.(*net.TCPConn), server.(*net.TCPConn))
	}
}
