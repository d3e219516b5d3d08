// Command coredns is CoreDNS with only the plugins that a closed cluster needs. It leaves out everything that
// talks to a cloud or forwards to another server, which also makes it quick to build.
package main

import (
	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/coremain"

	_ "github.com/coredns/coredns/plugin/cache"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/health"
	_ "github.com/coredns/coredns/plugin/kubernetes"
	_ "github.com/coredns/coredns/plugin/loadbalance"
	_ "github.com/coredns/coredns/plugin/log"
	_ "github.com/coredns/coredns/plugin/metrics"
	_ "github.com/coredns/coredns/plugin/ready"
	_ "github.com/coredns/coredns/plugin/template"
)

// The order is the order in which a query passes the plugins, whatever their order in the Corefile.
func init() {
	dnsserver.Directives = []string{
		"health",
		"ready",
		"prometheus",
		"errors",
		"log",
		"cache",
		"loadbalance",
		"kubernetes",
		"template",
	}
}

func main() {
	coremain.Run()
}
