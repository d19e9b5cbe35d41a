import java.net.InetSocketAddress;
import java.nio.ByteBuffer;
import java.nio.channels.*;

/** An echo server with one selector. It prints its port. */
public class Echo {
    public static void main(String[] arguments) throws Exception {
        Selector selector = Selector.open();
        ServerSocketChannel server = ServerSocketChannel.open().bind(new InetSocketAddress(System.getenv("LISTENS"), 0));
        server.configureBlocking(false);
        server.register(selector, SelectionKey.OP_ACCEPT);
        System.out.println(server.socket().getLocalPort());
        while (true) {
            selector.select();
            for (SelectionKey key : selector.selectedKeys()) {
                if (key.isAcceptable()) {
                    SocketChannel channel = server.accept();
                    channel.configureBlocking(false);
                    channel.register(selector, SelectionKey.OP_READ, ByteBuffer.allocate(1 << 16));
                    continue;
                }
                SocketChannel channel = (SocketChannel) key.channel();
                ByteBuffer buffer = (ByteBuffer) key.attachment();
                if (channel.read(buffer) < 0 && buffer.position() == 0) {
                    channel.close();
                    continue;
                }
                buffer.flip();
                channel.write(buffer);
                buffer.compact();
                key.interestOps(buffer.position() > 0 ? SelectionKey.OP_READ | SelectionKey.OP_WRITE : SelectionKey.OP_READ);
            }
            selector.selectedKeys().clear();
        }
    }
}
