// An echo server. It prints its port.
const server = require('net').createServer((socket) => { socket.pipe(socket); socket.on('error', () => {}); });
server.listen(0, '127.0.0.1', () => console.log(server.address().port));
