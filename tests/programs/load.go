// A load like that of hey: so many connections of Go's HTTP client at a time, and the errors that it saw.
package main

import (
	"flag"
	"fmt"
	"io"
	"net/http"
	"sync"
	"sync/atomic"
	"time"
)

func main() {
	connections := flag.Int("c", 50, "connections")
	duration := flag.Duration("z", time.Second, "how long")
	short := flag.Bool("disable-keepalive", false, "a connection for each request")
	length := flag.Int64("length", 0, "bytes of an answer")
	flag.Parse()
	transport := &http.Transport{MaxIdleConnsPerHost: *connections, DisableKeepAlives: *short}
	client := &http.Client{Transport: transport, Timeout: 20 * time.Second}
	var requests, errors atomic.Int64
	var group sync.WaitGroup
	end := time.Now().Add(*duration)
	for range *connections {
		group.Add(1)
		go func() {
			defer group.Done()
			for time.Now().Before(end) {
				answer, err := client.Get(flag.Arg(0))
				var got int64
				if err == nil {
					got, err = io.Copy(io.Discard, answer.Body)
					answer.Body.Close()
				}
				requests.Add(1)
				if err != nil || answer.StatusCode != 200 || got != *length {
					errors.Add(1)
					fmt.Println(err, got)
				}
			}
		}()
	}
	group.Wait()
	fmt.Printf("requests %d errors %d\n", requests.Load(), errors.Load())
}
