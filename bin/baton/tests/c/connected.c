/* connect(2) of a socket that has a connection, again and again: it is refused at once, and the connection goes on.
 * Usage: connected CASE [moved] */

#include "sockets.h"

#define ROUNDS 30
#define CALLS 1000

int main(int count, char **arguments)
{
    struct pair ends = connect_pair();
    struct sockaddr_in peer;
    socklen_t length = sizeof peer;
    CHECK(count >= 2 && strcmp(arguments[1], "again") == 0);
    alarm(STANDS_STILL);
    exchange(ends.client, ends.server, "there");
    exchange(ends.server, ends.client, "back");
    if (count > 2)
        until_on_nic(ends.client);
    CHECK(getpeername(ends.client, (struct sockaddr *)&peer, &length) == 0);
    for (int round = 0; round < ROUNDS; round++) {
        for (int call = 0; call < CALLS; call++)
            CHECK(connect(ends.client, (struct sockaddr *)&peer, length) == -1 && errno == EISCONN);
        exchange(ends.client, ends.server, "there");
        exchange(ends.server, ends.client, "back");
    }
    /* Also when it has ended. */
    CHECK(shutdown(ends.server, SHUT_WR) == 0 && read(ends.client, &peer, 1) == 0);
    CHECK(shutdown(ends.client, SHUT_WR) == 0 && read(ends.server, &peer, 1) == 0);
    CHECK(connect(ends.client, (struct sockaddr *)&peer, length) == -1 && errno == EISCONN);
    return 0;
}
