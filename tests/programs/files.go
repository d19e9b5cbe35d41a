// A static HTTP server and client: `serve DIRECTORY` prints its port; `fetch ADDRESS PATH SHA256...` fetches each path again and again for so
// many seconds as SECONDS says and compares.
package main

import (
	"crypto/sha256"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"time"
)

func main() {
	if os.Args[1] == "serve" {
		listener, err := net.Listen("tcp", net.JoinHostPort(os.Getenv("LISTENS"), "0"))
		check(err)
		fmt.Println(listener.Addr().(*net.TCPAddr).Port)
		check(http.Serve(listener, http.FileServer(http.Dir(os.Args[2]))))
	}
	seconds, err := strconv.ParseFloat(os.Getenv("SECONDS"), 64)
	check(err)
	end := time.Now().Add(time.Duration(seconds * float64(time.Second)))
	requests := 0
	for time.Now().Before(end) {
		for at := 3; at+1 < len(os.Args); at += 2 {
			answer, err := http.Get("http://" + os.Args[2] + "/" + os.Args[at])
			check(err)
			hash := sha256.New()
			_, err = io.Copy(hash, answer.Body)
			check(err)
			answer.Body.Close()
			if sum := fmt.Sprintf("%x", hash.Sum(nil)); sum != os.Args[at+1] {
				check(fmt.Errorf("%s is %s", os.Args[at], sum))
			}
			requests++
		}
	}
	fmt.Println(requests)
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
